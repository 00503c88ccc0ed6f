"""The lower bound: its rule against brute force, and that no schedule beats it."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, combinations
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.queue import TenantJobOrder
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.outcomes import percentile
from giornata_lab.loadgen.workload import MaskShape, Workload
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.bound import PooledTask, most_on_time
from giornata_lab.simulation.jobs import PictureSetting
from giornata_lab.simulation.machines import h800_flux
from giornata_lab.simulation.options import BindingTime, RunOptions
from giornata_lab.simulation.residency import TemplateSetting
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario
from tests.examples import examples


def brute(tasks: list[PooledTask]) -> int:
    """Every subset, in order."""
    for count in range(len(tasks), 0, -1):
        for kept in combinations(tasks, count):
            now, late = 0.0, False
            for task in kept:
                now = max(now, task.released_s) + task.seconds
                late = late or now > task.due_s
            if not late:
                return count
    return 0


@st.composite
def ordered(draw: st.DrawFn) -> list[PooledTask]:
    drawn = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.integers(1, 8)), max_size=8))
    released = list(accumulate(gap for gap, _, _ in drawn))
    due = accumulate((at + more for at, (_, more, _) in zip(released, drawn, strict=True)), max)
    return [
        PooledTask(float(at), float(by), float(took))
        for at, by, (_, _, took) in zip(released, due, drawn, strict=True)
    ]


@given(ordered())
@examples(times=4)  # few draws have subsets that differ, and a draw costs little
def test_the_rule_keeps_as_many_as_any_subset(tasks: list[PooledTask]) -> None:
    assert most_on_time(tasks) == brute(tasks)


def scenario(**fields: Any) -> Scenario:
    work = Workload(
        workload.MASK_RATIOS["public"], workload.STEPS, {1: 0.8, 4: 0.2}, {0: 1.0}, MaskShape.SQUARE
    )
    kept = TemplateSetting(preloaded=("t0",))
    return replace(
        Scenario((h800_flux(),) * 2, work, ArrivalSetting(40.0, 0.0), PictureSetting(), kept), **fields
    )


ONE_PICTURE = Workload(workload.MASK_RATIOS["public"], workload.STEPS, {1: 1.0}, {0: 1.0}, MaskShape.SQUARE)


@given(
    rate=st.floats(0.1, 1.5),
    rows=st.integers(1, 8),
    policy=st.sampled_from(SimPolicy),
    binding=st.sampled_from(BindingTime),
    seed=st.integers(0, 99),
    slowness=st.sampled_from([(1.0, 1.0), (1.0, 1.7), (1.7, 1.0)]),
)
def test_nothing_beats_the_bound(
    rate: float,
    rows: int,
    policy: SimPolicy,
    binding: BindingTime,
    seed: int,
    slowness: tuple[float, float],
) -> None:
    made = scenario(machines=tuple(replace(h800_flux(rows), slowness=slow) for slow in slowness))
    jobs = made.jobs(max(rate, 0.3), seed)
    latencies = made.run(jobs, RunOptions(policy=policy, binding=binding)).latencies()
    bound = made.bound(jobs)
    for percent in (50, 95, 100):
        assert bound.percentile(percent) <= percentile(latencies, percent) + 1e-6
    assert bound.mean() <= sum(latencies) / len(latencies) + 1e-6


def test_the_bound_is_met_by_a_job_alone_and_grows_with_the_load() -> None:
    made = scenario()
    [only, *_] = jobs = made.jobs(4.0, 1)
    alone = made.run([only], RunOptions()).latencies()
    assert made.bound([only]).percentile(95) == pytest.approx(alone[0], abs=0.01)
    at_once = made.bound(jobs).percentile(95)
    assert at_once > 2 * made.bound(made.jobs(0.4, 1)).percentile(95)


def test_one_worker_with_one_place_is_as_good_as_the_ideal_of_its_order() -> None:
    made = scenario(machines=(h800_flux(1),), workload=ONE_PICTURE)
    jobs = made.jobs(0.5, 1)
    in_turn = RunOptions(turn=TenantJobOrder.ARRIVAL)
    assert made.bound(jobs).in_order() == pytest.approx(made.run(jobs, in_turn).latencies())
    late = [job for job in jobs if job.at_s >= 20]
    assert made.bound(jobs).in_order(warmup_s=20) == made.bound(jobs).in_order()[-len(late) :]


def test_in_a_burst_tail_and_mean_are_less_than_where_rows_are_counted() -> None:
    """Fails where larger jobs are deferred by five times their work, and where a fleet fills up as one worker does."""
    burst = scenario(machines=(h800_flux(),) * 6, workload=ONE_PICTURE, arriving=ArrivalSetting(30.0, 0.0))
    drawn = [burst.jobs(4.2, seed) for seed in (1, 2)]

    def figures(policy: SimPolicy) -> tuple[float, float]:
        found = [burst.run(jobs, RunOptions.of(policy)).latencies() for jobs in drawn]
        return fmean(percentile(one, 95) for one in found), fmean(map(fmean, found))

    tail_s, mean_s = figures(SimPolicy.FINISH_TIME)
    baseline_tail_s, baseline_mean_s = figures(SimPolicy.REQUEST_LEVEL)
    assert tail_s < 0.95 * baseline_tail_s
    assert mean_s < 0.8 * baseline_mean_s
