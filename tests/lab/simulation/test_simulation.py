"""The simulator: against closed forms, against a simulation step by step, and what must hold whatever is simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import StepCosts
from giornata.scheduling.batch import RowKey
from giornata.scheduling.demand import JobDemand, RowLoad, RowShape
from giornata_lab.bench.systems.networks import PLAIN, PLAIN_4
from giornata_lab.loadgen.workload import arrival_times
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import (
    DIGEST,
    MODEL,
    EqualStepRun,
    SimulatedJob,
)
from giornata_lab.simulation.machines import Machine, TemplateStorage
from giornata_lab.simulation.options import BindingTime, RunOptions, StageSetting
from giornata_lab.simulation.residency import SimClock, StageServers, TemplateSetting
from giornata_lab.simulation.results import SimulatedRun, summary
from giornata_lab.simulation.simulator import Simulation
from giornata_lab.simulation.worker import SimWorker

COSTS = StepCosts((10.0, 0.0, 1.0, 0.0, 0.0, 0.0))
"""10 ms a step, and 1 ms a token."""
KEY = RowKey("j", 1, 0)
MACHINE = Machine(COSTS, PLAIN, rows=4)


def shape(computed: int = 5, steps: int = 10, *, corrects: bool = False) -> RowShape:
    return RowShape(text=0, image=20, computed=computed, steps=steps, begun=not corrects)


def job(number: int, at_s: float, *shapes: RowShape, template: str | None = "t0") -> SimulatedJob:
    return SimulatedJob(f"j{number}", at_s, JobDemand(MODEL, DIGEST, shapes or (shape(),), template))


def simulated(
    jobs: Sequence[SimulatedJob],
    machines: Sequence[Machine] = (MACHINE,),
    options: RunOptions | None = None,
    templates: TemplateSetting | None = None,
    stages: StageSetting | None = None,
) -> SimulatedRun:
    here = templates or TemplateSetting(preloaded=("t0",))
    return Simulation(machines, jobs, options or RunOptions(), templates=here, stages=stages).run()


def ends(run: SimulatedRun) -> dict[str, float]:
    return {ended.job.job_id: ended.ended_s for ended in run.ended}


def test_the_first_step_of_an_edit_that_corrects_is_computed_in_full() -> None:
    assert ends(simulated([job(0, 0.0, shape(corrects=True))])) == pytest.approx({"j0": 0.03 + 9 * 0.015})


def test_stages_are_passed_through_pictures_one_by_one_on_each_server() -> None:
    run = simulated(
        [job(0, 0.0, *[shape()] * 3)], stages=StageSetting(encode_ms=100, finish_ms=50, servers=2)
    )
    assert ends(run) == pytest.approx({"j0": 0.1 + 10 * 0.025 + 2 * 0.05})


def test_one_worker_with_one_place_is_the_queue_of_the_textbook() -> None:
    """M/D/1 at half its capacity: every wait by Lindley's recursion, and their mean by Pollaczek and Khinchine."""
    machine, service = replace(MACHINE, rows=1), 0.15
    times = arrival_times(0.5 / service, 1200 * service / 0.5, seed=3)
    run = simulated([job(number, at_s) for number, at_s in enumerate(times)], [machine])
    free, expected = 0.0, {}
    for number, at_s in enumerate(times):
        free = max(free, at_s) + service
        expected[f"j{number}"] = free
    assert ends(run) == pytest.approx(expected)
    waits = [ended.latency_s - service for ended in run.ended]
    assert fmean(waits) == pytest.approx(0.5 * service / (2 * (1 - 0.5)), rel=0.15)


@dataclass(eq=False)
class Row:
    job_id: str
    load: RowLoad
    left: int


def step_by_step(jobs: Sequence[SimulatedJob], machine: Machine) -> dict[str, float]:
    """One worker that takes every job at its arrival, one step after the other."""
    coming = [(j, s.load(machine.pace, reuses=True)) for j in jobs for s in j.demand.shapes]
    now, running, found = 0.0, list[Row](), dict[str, float]()
    while coming or running:
        if not running:
            now = max(now, coming[0][0].at_s)
        while coming and coming[0][0].at_s <= now and len(running) < machine.rows:
            arrived, load = coming.pop(0)
            running.append(Row(arrived.job_id, load, load.steps))
        step_ms = machine.pace.base_ms
        for row in running:
            step_ms += row.load.step_ms + (row.load.first_ms if row.left == row.load.steps else 0.0)
        now += step_ms / 1e3
        for row in running:
            row.left -= 1
        for row in [row for row in running if not row.left]:
            running.remove(row)
            found[row.job_id] = now
    return found


shapes = st.builds(shape, st.integers(1, 20), st.integers(1, 12), corrects=st.booleans())
arrivals = st.lists(
    st.tuples(st.integers(0, 400), st.lists(shapes, min_size=1, max_size=3)), min_size=1, max_size=12
)


def jobs_of(drawn: Sequence[tuple[int, Sequence[RowShape]]], templates: int = 1) -> list[SimulatedJob]:
    """No two arrive at once, and none at the end of a step: steps begin microseconds off."""
    ordered = sorted(drawn, key=lambda pair: pair[0])
    return [
        job(number, at_ms / 1e3 + 0.000371 + number * 1e-6, *rows, template=f"t{number % templates}")
        for number, (at_ms, rows) in enumerate(ordered)
    ]


@given(arrivals, st.integers(1, 5))
def test_jumping_over_equal_steps_changes_nothing(drawn: list[tuple[int, list[RowShape]]], rows: int) -> None:
    machine, jobs = replace(MACHINE, rows=rows), jobs_of(drawn)
    run = simulated(jobs, [machine], RunOptions(binding=BindingTime.ARRIVAL))
    assert ends(run) == pytest.approx(step_by_step(jobs, machine))


@given(
    drawn=arrivals,
    machines=st.lists(
        st.builds(
            Machine,
            st.just(COSTS),
            st.just(PLAIN),
            rows=st.integers(1, 5),
            slowness=st.sampled_from([1.0, 1.7]),
            storage=st.sampled_from([TemplateStorage(), TemplateStorage(2.0, 3.0, 10.0)]),
        ),
        min_size=1,
        max_size=4,
    ),
    policy=st.sampled_from(SimPolicy),
    binding=st.sampled_from(BindingTime),
    cold=st.booleans(),
)
def test_every_job_ends_once_and_no_worker_computes_two_batches_at_a_time(
    drawn: list[tuple[int, list[RowShape]]],
    machines: list[Machine],
    policy: SimPolicy,
    binding: BindingTime,
    cold: bool,
) -> None:
    jobs = jobs_of(drawn, templates=4)
    templates = TemplateSetting(size_bytes=1.0, preloaded=() if cold else ("t0", "t1"))
    computed: dict[str, list[tuple[float, float, int]]] = defaultdict(list)
    real = SimWorker._end

    def ended(self: SimWorker, segment: EqualStepRun, now: float) -> None:
        computed[self.name].append((segment.began_s, now, len(segment.rows)))
        real(self, segment, now)

    options = RunOptions(policy=policy, binding=binding)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimWorker, "_end", ended)
        run = simulated(jobs, machines, options, templates)
    assert sorted(ended.job.job_id for ended in run.ended) == sorted(j.job_id for j in jobs)
    assert all(e.job.at_s <= e.assigned_s <= e.denoised_s <= e.ended_s for e in run.ended)
    for number, machine in enumerate(machines):
        batches = computed[f"w{number:04d}"]
        assert all(before[1] <= after[0] for before, after in pairwise(batches))
        assert all(rows <= machine.rows + 1 for _, _, rows in batches), "a template run may be one more"
    again = simulated(jobs, machines, options, templates)
    assert again == run, "equal seeds, equal runs"


def test_what_is_edited_again_is_recorded_and_then_reused() -> None:
    jobs = [job(number, float(number)) for number in range(4)]
    run = simulated(jobs, templates=TemplateSetting(size_bytes=1.0))
    full, masked = 10 * 0.03, 10 * 0.015
    latencies = run.latencies()
    assert latencies[0] == pytest.approx(full)
    assert latencies[1] > full, "the run that records shares its steps"
    assert latencies[2:] == pytest.approx([masked, masked])
    assert summary(run).recorded == 1
    assert (summary(run).hits_memory, summary(run).misses) == (2, 2)


def test_a_template_on_disk_is_read_before_its_edit_and_the_least_used_goes_first() -> None:
    machine = replace(
        MACHINE, storage=TemplateStorage(memory_bytes=1e6, disk_bytes=9e6, disk_bytes_per_s=1e7)
    )
    jobs = [
        job(number, float(number), template=name)
        for number, name in enumerate(["a", "a", "b", "b", "a", "a"])
    ]
    run = simulated(jobs, [machine], templates=TemplateSetting(size_bytes=1e6))
    assert run.latencies()[4:] == pytest.approx([0.1 + 0.15, 0.15])
    assert (summary(run).hits_disk, summary(run).hits_memory) == (1, 1)


def test_loads_that_exceed_computing_make_steps_longer_and_rows_of_one_template_share_them() -> None:
    linked = replace(
        MACHINE, operations=PLAIN_4, costs=StepCosts((10.0, 0.0, 0.25, 0.0, 0.0, 0.0), (0.0, 1e-6))
    )
    alike = [job(0, 0.0), job(1, 0.0)]
    differ = [alike[0], job(2, 0.0, template="t1")]
    here = TemplateSetting(preloaded=("t0", "t1"))

    def latest(jobs: list[SimulatedJob], kv_bytes: float) -> float:
        return max(simulated(jobs, [linked], templates=replace(here, kv_bytes=kv_bytes)).latencies())

    hidden_s = latest(differ, 0.0)
    assert latest(alike, 15e6) == hidden_s, "15 ms of loads hide behind 20 of computing"
    assert hidden_s < latest(differ, 15e6) <= 10 * 0.05, "30 ms do not; nothing is slower than in full"


def test_a_worker_on_which_loads_do_not_hide_is_found_out_and_gets_less() -> None:
    def share(kv_bytes: float) -> float:
        machines = [
            replace(
                MACHINE,
                operations=PLAIN_4,
                costs=StepCosts((10.0, 0.0, 0.25, 0.0, 0.0, 0.0), (0.0, ms_a_byte)),
                device=device,
            )
            for device, ms_a_byte in (("near", 1e-9), ("far", 1e-6))
        ]
        jobs = [job(number, number * 0.1) for number in range(300)]
        here = TemplateSetting(preloaded=("t0",), kv_bytes=kv_bytes)
        run = simulated(jobs, machines, RunOptions(policy=SimPolicy.FINISH_TIME), templates=here)
        return sum(ended.worker == "w0000" for ended in run.ended[50:]) / 250

    assert share(1e6) == pytest.approx(0.5, abs=0.1)
    assert share(60e6) > 0.6


def test_jobs_bound_at_their_arrival_wait_at_workers_and_others_in_the_line() -> None:
    jobs = [job(number, 0.001 * number) for number in range(20)]
    machine = replace(MACHINE, rows=2)
    arrival = simulated(jobs, [machine], RunOptions(binding=BindingTime.ARRIVAL))
    late = simulated(jobs, [machine], RunOptions(binding=BindingTime.LATE))
    assert max(ended.waited_s for ended in arrival.ended) == 0.0
    assert sum(ended.waited_s > 0 for ended in late.ended) == 18


def test_a_stage_has_so_many_servers() -> None:
    clock = SimClock()
    pool, ended = StageServers(2, clock), []
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("nothing", 0.0), ("d", 2.0)):
        pool.serve(seconds, 0.0, partial(lambda name, now: ended.append((name, now)), name))
    while clock.step():
        pass
    assert ended == [("nothing", 0.0), ("b", 1.0), ("c", 2.0), ("a", 3.0), ("d", 4.0)]
