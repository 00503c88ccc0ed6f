"""Simulated LoRAs and ControlNets: against hop times by hand, and what must hold whatever comes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import StepCosts
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.wire.workers import AdapterLoad, Tier
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.machines import Machine
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.residency import AdapterSetting, LoadReason, SimClock, SimLoras
from giornata_lab.simulation.results import SimulatedRun, summary
from giornata_lab.simulation.simulator import Simulation
from tests.lab.simulation.test_simulation import MACHINE, ends, job

A, B = NeededLora("a", 100), NeededLora("b", 200)
SETTING = AdapterSetting(
    device_bytes=300,
    memory_bytes=300,
    disk_bytes=300,
    store_bytes_per_s=10,
    disk_bytes_per_s=50,
    link_bytes_per_s=100,
)
"""A: 10 s from the store, 2 s from disk, 1 s onto the device; B: twice as long."""


def asking(number: int, at_s: float, *loras: NeededLora) -> SimulatedJob:
    made = job(number, at_s, template=None)
    return replace(made, demand=replace(made.demand, adapters=loras))


def simulated(
    jobs: list[SimulatedJob], machine: Machine = MACHINE, *, encode_ms: float = 0.0, adapters: bool = True
) -> SimulatedRun:
    options, stages = RunOptions(adapters=adapters), StageSetting(encode_ms=encode_ms)
    return Simulation([machine], jobs, options, stages=stages, adapters=SETTING).run()


COMPUTING_S = 10 * (10 + 20) / 1e3
"""Time of a job alone on :data:`MACHINE`, in full."""


def test_rows_wait_for_every_hop_of_their_loras_and_for_those_that_are_on_their_way() -> None:
    run = simulated([asking(0, 0.0, A), asking(1, 5.0, A), asking(2, 30.0, A), asking(3, 40.0, A, B)])
    assert ends(run) == pytest.approx(
        {
            "j0": 11 + 0.03 + 9 * 0.05,
            "j1": 11 + 0.03 + 9 * 0.05 + 0.03,
            "j2": 30 + COMPUTING_S,
            "j3": 40 + 20 + 2 + COMPUTING_S,
        },
    )
    (counted,) = run.workers
    assert counted.lora_hits == {None: 2, Tier.DEVICE: 3}
    assert summary(run).lora_hit_share == pytest.approx(3 / 5)
    assert summary(run).lora_wait_mean_s == pytest.approx((11 + 6 + 0 + 22) / 4)


def test_a_lora_that_had_to_go_comes_from_the_next_tier() -> None:
    clock, told = SimClock(), list[AdapterLoad]()
    loras = SimLoras(replace(SETTING, device_bytes=200, memory_bytes=200), clock, told.append)
    for lora in (A, B):
        ready = loras.ready_s([lora], clock.now)
        while clock.step():
            pass
        assert clock.now == ready
    assert loras.resident() == {Tier.DEVICE: ("b",), Tier.MEMORY: ("b",), Tier.DISK: ("b", "a")}
    began = clock.now
    assert loras.ready_s([A], began) == pytest.approx(began + 2 + 1)
    while clock.step():
        pass
    assert [load.source for load in told] == [None, Tier.MEMORY, None, Tier.MEMORY, Tier.DISK, Tier.MEMORY]
    assert [load.load_ms for load in told] == pytest.approx([10e3, 1e3, 20e3, 2e3, 2e3, 1e3])


def test_loads_queue_on_their_links() -> None:
    """From the store one after the other, 10 s each; then each has the link to the device for 1 s."""
    clock = SimClock()
    roomy = replace(SETTING, device_bytes=1e3, memory_bytes=1e3)
    loras = SimLoras(roomy, clock, lambda _: None)
    ready = [loras.ready_s([NeededLora(name, 100)], 0.0) for name in "abc"]
    assert ready == pytest.approx([11, 21, 31])


def test_loads_ahead_take_no_room_from_rows() -> None:
    """A device of 300 bytes: with A (100) held, B (200) fits beside it, and then nothing until A's rows have left."""
    clock = SimClock()
    loras = SimLoras(replace(SETTING, memory_bytes=1e3), clock, lambda _: None)
    loras.hold(("j", 1), [A])
    loras.ready_s([A], 0.0)
    loras.ahead([B], 0.0)
    loras.ahead([NeededLora("c", 50)], 0.0)
    while clock.step():
        pass
    assert set(loras.resident()[Tier.DEVICE]) == {"a", "b"}
    assert [why for _, why in loras.loaded] == [LoadReason.DEMAND, LoadReason.AHEAD]
    assert "c" in loras.resident()[Tier.MEMORY], "it waits one hop away"
    loras.ahead([NeededLora("c", 50)], clock.now)
    while clock.step():
        pass
    assert set(loras.resident()[Tier.DEVICE]) == {"a", "c"}, "B, which no row holds, makes room"


needs = st.lists(
    st.tuples(st.integers(0, 40), st.sets(st.integers(0, 6), min_size=1, max_size=2)), min_size=1, max_size=25
)


@given(asked=needs, budgets=st.tuples(*[st.integers(0, 400)] * 3))
def test_loras_arrive_within_their_time_and_tiers_within_their_budgets(
    asked: list[tuple[int, set[int]]], budgets: tuple[int, int, int]
) -> None:
    sizes = {f"l{number}": 40 * (1 + number % 3) for number in range(7)}
    clock, told = SimClock(), list[AdapterLoad]()
    setting = replace(SETTING, device_bytes=budgets[0], memory_bytes=budgets[1], disk_bytes=budgets[2])
    loras = SimLoras(setting, clock, told.append)
    asked_for = 0

    def come(numbers: set[int], now: float) -> None:
        nonlocal asked_for
        wanted = [NeededLora(f"l{number}", sizes[f"l{number}"]) for number in sorted(numbers)]
        ready = loras.ready_s(wanted, now)
        asked_for += len(wanted)
        alone = max(
            sum(setting.link(tier).takes_s(lora.size_bytes) for tier in (None, Tier.MEMORY))
            for lora in wanted
        )
        hops = (setting.link(tier).takes_s(size) for size in sizes.values() for tier in (None, Tier.MEMORY))
        queued = sum(hops) * len(asked)
        assert now <= ready <= now + alone + queued

    for at_s, numbers in asked:
        clock.at(at_s, lambda now, numbers=numbers: come(numbers, now))  # type: ignore[misc]  # bound per turn
    while clock.step():
        for tier, most in zip((Tier.DEVICE, Tier.MEMORY, Tier.DISK), budgets, strict=True):
            assert sum(sizes[name] for name in loras.resident()[tier]) <= most
    assert loras.hits.total() == asked_for
    assert sum(load.source is None for load in told) >= loras.hits[None] * (min(budgets) > 0)


def test_loras_and_controlnets_lengthen_steps_by_their_multiplications() -> None:
    costs = StepCosts((10.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.25, 2.0, 0.5))
    machine = replace(MACHINE, costs=costs, controls=(("c", 8),))
    plain = job(0, 0.0, template=None)
    shape = replace(plain.demand.shapes[0], low_rank=4.0, segments=1.0)
    controls = (NeededControl("c", 0.5), NeededControl("elsewhere", 1.0))
    made = replace(plain, demand=replace(plain.demand, shapes=(shape,), controls=controls))
    run = simulated([made], machine)
    work_ms = 10 + 20 + 0.25 * 4 * 20 + 2 + 0.5 * (0.5 * 4 * 20)
    assert ends(run)["j0"] == pytest.approx(10 * work_ms / 1e3)
