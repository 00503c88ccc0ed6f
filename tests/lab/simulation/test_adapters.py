"""Simulated LoRAs and ControlNets: against hop times by hand, and what must hold whatever comes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.planning.operations import low_rank_weights
from giornata.planning.step_costs import StepCosts
from giornata.scheduling.adapters import NeededControl, NeededLora
from giornata.wire.workers import AdapterLoad, Tier
from giornata_lab.bench.systems.networks import PLAIN
from giornata_lab.loadgen import workload as facts
from giornata_lab.loadgen.workload import AdapterWorkload, MaskShape, WorkloadRequest
from giornata_lab.simulation.adapters import AdapterDemand, held_controls, with_adapters
from giornata_lab.simulation.baselines import SimPolicy
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.machines import Machine, flashps_flux, h800_flux, read
from giornata_lab.simulation.options import RunOptions, StageSetting
from giornata_lab.simulation.processors import SimClock
from giornata_lab.simulation.residency import AdapterSetting, LoadReason, SimHost, SimLoras
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


def test_workers_of_a_host_share_its_memory_and_its_link_to_the_store() -> None:
    clock = SimClock()
    roomy = replace(SETTING, device_bytes=1e3, memory_bytes=1e3)
    host = SimHost(roomy, clock)
    one, other = (SimLoras(roomy, clock, lambda _: None, host) for _ in range(2))
    assert one.ready_s([A], 0.0) == pytest.approx(11)
    assert other.ready_s([A], 0.0) == pytest.approx(11), "it comes from the store once"
    assert other.ready_s([B], 0.0) == pytest.approx(10 + 20 + 2)
    while clock.step():
        pass
    assert other.ready_s([A, B], 50.0) == 50.0
    assert one.ready_s([B], 50.0) == pytest.approx(52)


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


def test_what_keeps_nothing_loads_every_time() -> None:
    clock = SimClock()
    loras = SimLoras(replace(SETTING, memory_bytes=1e3, keeps=False), clock, lambda _: None)
    for attempt in range(3):
        loras.hold(("j", attempt), [A])
        loras.ready_s([A], clock.now)
        while clock.step():
            pass
        loras.release(("j", attempt))
        assert loras.resident()[Tier.DEVICE] == ()
    assert len(loras.loaded) == 3


def test_what_was_prefetched_is_waited_for_less() -> None:
    waits = {
        encode_ms: summary(simulated([asking(0, 0.0, A)], encode_ms=encode_ms)).lora_wait_mean_s
        for encode_ms in (0.0, 4000.0, 60_000.0)
    }
    assert waits == pytest.approx({0.0: 11, 4000.0: 7, 60_000.0: 0})
    blind = simulated([asking(0, 0.0, A)], encode_ms=4000.0, adapters=False)
    assert summary(blind).lora_wait_mean_s == pytest.approx(11)


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
            sum(setting.hop_s(tier, lora.size_bytes) for tier in (None, Tier.MEMORY)) for lora in wanted
        )
        hops = (setting.hop_s(tier, size) for size in sizes.values() for tier in (None, Tier.MEMORY))
        queued = sum(hops) * len(asked)
        assert now <= ready <= now + alone + queued

    for at_s, numbers in asked:
        clock.at(at_s, lambda now, numbers=numbers: come(numbers, now))  # type: ignore[misc]  # bound per turn
    while clock.step():
        for tier, most in zip((Tier.DEVICE, Tier.MEMORY, Tier.DISK), budgets, strict=True):
            assert sum(sizes[name] for name in loras.resident()[tier]) <= most
    assert loras.hits.total() == asked_for
    assert sum(load.source is None for load in told) >= loras.hits[None] * (min(budgets) > 0)


def asked_for(
    jobs: list[SimulatedJob], workload: AdapterWorkload, asked: AdapterDemand, seed: int
) -> list[SimulatedJob]:
    """The jobs with adapters that are drawn for their times."""
    names = workload.draw([one.at_s for one in jobs], seed)
    requests = [
        WorkloadRequest(one.at_s, 0, 0.1, 10, 1, 0, MaskShape.BLOB, adapters)
        for one, adapters in zip(jobs, names, strict=True)
    ]
    return with_adapters(jobs, requests, asked, seed)


def test_jobs_have_as_many_adapters_as_the_published_services() -> None:
    jobs = [job(number, float(number)) for number in range(3000)]
    asked = AdapterDemand(controls=facts.ADAPTERS["katz-a"]["controlnets"])
    made = asked_for(jobs, AdapterWorkload.of("katz-a"), asked, seed=1)
    assert made == asked_for(jobs, AdapterWorkload.of("katz-a"), asked, seed=1)
    shares = {
        kind: {number: count / len(made) for number, count in Counter(counts).items()}
        for kind, counts in (
            ("loras", [len(one.demand.adapters) for one in made]),
            ("controlnets", [len(one.demand.controls) for one in made]),
        )
    }
    for kind, told in shares.items():
        assert told == pytest.approx(facts.ADAPTERS["katz-a"][kind], abs=0.03)
    used = Counter(lora.digest for one in made for lora in one.demand.adapters)
    most = sum(count for _, count in used.most_common(round(0.2 * facts.LORAS)))
    assert most / used.total() == pytest.approx(0.735, abs=0.03), "a fifth of 874 by Zipf's law of 0.92"
    for one in made:
        digests = [lora.digest for lora in one.demand.adapters]
        assert len(set(digests)) == len(digests)
        (shape,) = one.demand.shapes
        assert shape.low_rank == sum(low_rank_weights(0, lora.size_bytes) for lora in one.demand.adapters)
    assert {lora.size_bytes for one in made for lora in one.demand.adapters} == set(facts.LORA_BYTES)
    assert asked_for(jobs, AdapterWorkload(), AdapterDemand(), seed=1) == jobs


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


@pytest.mark.parametrize("machine", [h800_flux(), flashps_flux()])
def test_a_published_machine_takes_a_percent_longer_with_a_lora_of_a_percent_of_its_weights(
    machine: Machine,
) -> None:
    plain = job(0, 0.0).demand.shapes[0]
    whole = replace(plain, text=512, image=4096, computed=800)
    flux_weights = h800_flux().operations.total[1, 1]
    one = replace(whole, low_rank=0.01 * flux_weights)
    pace = machine.pace
    linear_ms = pace.costs.compute[2] * machine.operations.total[1, 1] * (512 + 800)
    (alone,), (adapted,) = (
        replace(job(0, 0.0).demand, shapes=(shape,)).loads(pace, reuses=True) for shape in (whole, one)
    )
    assert adapted.step_ms - alone.step_ms == pytest.approx(0.01 * linear_ms)


def test_costs_by_hand_without_adapters_let_them_cost_nothing() -> None:
    text = "[[workers]]\ncosts = {compute = [1, 0, 1, 0, 0, 0]}"
    (machine,) = read(text, ".toml", lambda _: "")
    assert list(machine.costs.compute) == [1, 0, 1, 0, 0, 0, 0, 0, 0]
    with pytest.raises(ValueError, match="compute"):
        read(text.replace("[1, 0, 1", "[0, 1"), ".toml", lambda _: "")


def test_a_router_that_knows_loras_finds_them_more_often_and_rows_wait_less() -> None:
    plain = [job(number, number / 2, template=None) for number in range(240)]
    jobs = asked_for(plain, AdapterWorkload.of("katz-b", 40), AdapterDemand(), seed=2)
    setting = AdapterSetting(
        device_bytes=2e9, memory_bytes=6e9, disk_bytes=6e9, store_bytes_per_s=2e9, disk_bytes_per_s=4e9
    )
    machine = Machine(StepCosts((10.0, 0.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)), PLAIN, rows=4)
    found = {}
    for knows in (True, False):
        run = Simulation([machine] * 4, jobs, RunOptions(adapters=knows), adapters=setting).run()
        found[knows] = summary(run)
    assert (found[True].lora_ready_share or 0) > (found[False].lora_ready_share or 0) + 0.1
    assert (found[True].lora_loads or 0) < 0.85 * (found[False].lora_loads or 0)
    assert (found[True].lora_wait_mean_s or 0) < 0.9 * (found[False].lora_wait_mean_s or 0)
    assert found[True].mean_s < found[False].mean_s


def test_baselines_do_not_know_adapters() -> None:
    assert RunOptions.of(SimPolicy.FINISH_TIME).adapters
    assert not RunOptions.of(SimPolicy.REQUEST_LEVEL).adapters
    assert len(held_controls(5)) == 47
