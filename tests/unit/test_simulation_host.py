"""Simulated processes on fewer processors than there are of them."""

from __future__ import annotations

import math

import pytest

from giornata.planning.costs import StepCosts
from giornata.scheduling.demand import Demand, RowShape
from giornata.simulation.host import Host
from giornata.simulation.jobs import DIGEST, MODEL, Job
from giornata.simulation.machines import Machine
from giornata.simulation.simulator import Options, Simulation, Stages

MACHINE = Machine(StepCosts((0.0, 0.0, 1.0, 0.0, 0.0)), 1)
"""A token takes a millisecond."""
SHAPE = RowShape(text=0, image=100, computed=100, steps=10)
"""One second."""


def jobs(*times: float) -> list[Job]:
    return [Job(f"j{i}", at_s, Demand(MODEL, DIGEST, (SHAPE,), None)) for i, at_s in enumerate(times)]


def latencies(count: int, cores: float, *times: float, stages: Stages | None = None) -> list[float]:
    made = Simulation((MACHINE,) * count, jobs(*times), Options(), stages=stages, cores=cores)
    return made.run().latencies()


def test_two_workers_on_one_core_take_twice_as_long() -> None:
    assert latencies(2, 2, 0, 0) == pytest.approx([1, 1])
    assert latencies(2, 1, 0, 0) == pytest.approx([2, 2], abs=0.2), "the first step begins alone"


def test_who_is_alone_is_not_slowed() -> None:
    assert latencies(2, 1, 0, 5) == pytest.approx([1, 1])
    assert latencies(2, math.inf, 0, 0) == pytest.approx([1, 1])


def test_a_stage_takes_its_share_from_workers() -> None:
    stages = Stages(finish_ms=400, servers=1)
    alone, crowded = (latencies(2, cores, 0, 0.5, stages=stages) for cores in (3, 1))
    assert alone == pytest.approx([1.4, 1.4])
    assert crowded[0] > alone[0]
    assert crowded[1] > alone[1]
    assert max(crowded[0], crowded[1] + 0.5) == pytest.approx(2.8, abs=0.3), "one core does 2.8 s of work"


def test_hops_delay_and_take_no_processor() -> None:
    assert latencies(2, 1, 0, stages=Stages(hops_ms=300)) == pytest.approx([1.3])


def test_nobody_computes_when_all_have_ended() -> None:
    host = Host(1)
    host.begin()
    assert host.slowness == 2
    host.end()
    assert host.slowness == 1
