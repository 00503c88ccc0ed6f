"""Simulated processes on fewer processors than there are of them."""

from __future__ import annotations

import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.cost_model import StepCosts
from giornata.scheduling.demand import JobDemand, RowShape
from giornata_lab.bench.systems.networks import PLAIN
from giornata_lab.simulation.jobs import DIGEST, MODEL, SimulatedJob
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.processors import Processors, SimClock, StageServers

MACHINE = Machine(StepCosts((0.0, 0.0, 1.0, 0.0, 0.0, 0.0)), PLAIN)
"""A token takes a millisecond."""
SHAPE = RowShape(text=0, image=100, computed=100, steps=10)
"""One second."""


def jobs(*times: float) -> list[SimulatedJob]:
    return [
        SimulatedJob(f"j{i}", at_s, JobDemand(MODEL, DIGEST, (SHAPE,), None)) for i, at_s in enumerate(times)
    ]


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
