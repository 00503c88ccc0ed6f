"""Simulated processes on fewer processors than there are of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.step_costs import StepCosts
from giornata.scheduling.demand import JobDemand, RowShape
from giornata_lab.bench.systems.networks import PLAIN
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimulatedJob
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.processors import Processors, SimClock, StageServers
from giornata_lab.simulation.simulator import Simulation

MACHINE = Machine(StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)), PLAIN)
"""A token takes a millisecond."""
SHAPE = RowShape(text=0, image=100, computed=100, steps=10)
"""One second."""


def jobs(*times: float) -> list[SimulatedJob]:
    return [
        SimulatedJob(f"j{i}", at_s, JobDemand(MODEL, DIGEST, (SHAPE,), None)) for i, at_s in enumerate(times)
    ]


def latencies(count: int, cores: float, *times: float, stages: StageSetting | None = None) -> list[float]:
    made = Simulation((MACHINE,) * count, jobs(*times), RunOptions(), stages=stages, cores=cores)
    return made.run().latencies()


def test_two_workers_on_one_core_take_twice_as_long() -> None:
    assert latencies(2, 2, 0, 0) == pytest.approx([1, 1])
    assert latencies(2, 1, 0, 0) == pytest.approx([2, 2])
    assert latencies(2, 1.6, 0, 0) == pytest.approx([1.25, 1.25])


def test_who_is_alone_is_not_slowed() -> None:
    assert latencies(2, 1, 0, 5) == pytest.approx([1, 1])
    assert latencies(2, math.inf, 0, 0) == pytest.approx([1, 1])


def test_a_stage_takes_its_share_from_workers() -> None:
    stages = StageSetting(finish_ms=400, servers=1)
    alone, crowded = (latencies(2, cores, 0, 0.5, stages=stages) for cores in (3, 1))
    assert alone == pytest.approx([1.4, 1.4])
    assert crowded[0] > alone[0]
    assert crowded[1] > alone[1]
    assert max(crowded[0], crowded[1] + 0.5) == pytest.approx(2.8), "one core does 2.8 s of work"


def test_what_is_relayed_is_relayed_one_after_the_other() -> None:
    relaying = StageSetting(relay_ms=400)
    assert latencies(1, math.inf, 0, stages=relaying) == pytest.approx([1.4])
    assert latencies(3, math.inf, 0, 0, 0, stages=relaying) == pytest.approx([1.4, 1.6, 1.8])
    assert max(latencies(2, 1, 0, 0, stages=relaying)) == pytest.approx(2.8), "on one core it takes its share"


def test_hops_delay_and_take_no_processor() -> None:
    assert latencies(2, 1, 0, stages=StageSetting(hops_ms=300)) == pytest.approx([1.3])


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6),
    st.sampled_from([0.5, 1.0, 1.5, 2.0, 3.0, math.inf]),
)
def test_processors_are_shared_evenly_at_every_moment(tasks: list[tuple[int, int]], cores: float) -> None:
    clock, ended = SimClock(), [math.nan] * len(tasks)
    host = Processors(clock, cores)

    def begin(index: int, now: float) -> None:
        host.compute(tasks[index][1] / 10, now, lambda then: ended.__setitem__(index, then))

    for index, (came, _) in enumerate(tasks):
        clock.at(came / 10, partial(begin, index))
    while clock.step():
        pass
    assert ended == pytest.approx(shared(tasks, cores), abs=0.02)


def shared(tasks: list[tuple[int, int]], cores: float) -> list[float]:
    """When they end, by little moments."""
    moment, now = 0.001, 0.0
    left, ended = [work / 10 for _, work in tasks], [math.nan] * len(tasks)
    while any(work > 0 for work in left):
        computing = [i for i, (came, _) in enumerate(tasks) if came / 10 <= now + 1e-9 and left[i] > 0]
        now += moment
        for i in computing:
            left[i] -= moment * min(1.0, cores / len(computing))
            if left[i] <= 0:
                ended[i] = now
    return ended


def test_a_stage_has_so_many_servers() -> None:
    clock = SimClock()
    pool, ended = StageServers(2, Processors(clock)), []
    for name, seconds in (("a", 3.0), ("b", 1.0), ("c", 1.0), ("nothing", 0.0), ("d", 2.0)):
        pool.serve(seconds, 0.0, partial(lambda name, now: ended.append((name, now)), name))
    while clock.step():
        pass
    assert ended == [("nothing", 0.0), ("b", 1.0), ("c", 2.0), ("a", 3.0), ("d", 4.0)]
