"""LoRAs and ControlNets of jobs: where they are, how long they take to arrive, and which worker that makes the best."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S
from giornata.planning.operations import low_rank_weights
from giornata.residency.use_based import HostTiers
from giornata.scheduling.adapters import (
    LANES,
    LoraLoadTimes,
    NeededControl,
    NeededLora,
    fastest_tiers,
    is_control_of,
)
from giornata.scheduling.demand import FinishEstimator, PlacementEstimate, RowLoad, WorkerLoad
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import CandidateWorker, finish_time
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork
from giornata.wire.controlnets import ControlBase, ControlState
from giornata.wire.loras import HostTier, TierChange
from giornata.wire.workers import AdapterLoad, ServiceName, ServiceState, Tier
from giornata_lab.bench.systems.networks import plain
from giornata_lab.simulation.baselines import SimPolicy, policy_of
from tests.fakes.fleet import state_of, worker_costs
from tests.present import present
from tests.unit.scheduling.test_placement import DEMAND, SHAPE, choose, placement, row, telling, worker

TIERS = (None, Tier.DISK, Tier.MEMORY, Tier.DEVICE)
MB = 1_000_000
LORA = NeededLora("a" * 64, 341 * MB)
OTHER = NeededLora("b" * 64, 797 * MB)
COSTS = worker_costs(1.0, 0.0, 0.001)
"""A row of 16 tokens in full adds 0.016 ms a layer to a millisecond."""


def having(name: str, tier: Tier | None, *loras: NeededLora, running: int = 0) -> ServiceState:
    """A worker that has LoRAs in a tier, and so many rows of ten steps."""
    rows = [row(f"{name}-{number}", 0, 10) for number in range(running)]
    resident = {tier: tuple(lora.digest for lora in loras)} if tier else {}
    return telling(worker(name, *rows), adapters_resident=resident, cost_model=COSTS, blocks=plain(4))


def arrived(source: Tier | None, ms_per_mb: float) -> AdapterLoad:
    return AdapterLoad(source=source, size_bytes=100 * MB, load_ms=100 * ms_per_mb)


def test_a_lora_takes_every_hop_from_where_it_is() -> None:
    arrivals = LoraLoadTimes()
    for source, ms in ((None, 4.0), (Tier.DISK, 1.0), (Tier.MEMORY, 0.1)):
        for _ in range(60):
            arrivals.observe(arrived(source, ms))
    told = [arrivals.ms(10 * MB, tier) for tier in TIERS]
    assert told == pytest.approx([41.0, 11.0, 1.0, 0.0], rel=1e-3)
    assert arrivals.repeated_ms(NeededLora("l", 10 * MB)) == pytest.approx(40.0, rel=1e-3)


def test_a_set_arrives_lora_by_lora_from_where_each_is() -> None:
    known = placement(having("a", Tier.DISK, LORA))
    demand, arrivals = replace(DEMAND, adapters=(LORA, OTHER)), LoraLoadTimes()
    (here,) = known.candidates(demand, 8)
    each = arrivals.ms(LORA.size_bytes, Tier.DISK), arrivals.ms(OTHER.size_bytes, None)
    assert here.wait_ms == pytest.approx(sum(each))
    assert [digest for digest, _ in here.absent] == [OTHER.digest]


def test_the_first_load_outweighs_what_was_assumed() -> None:
    arrivals = LoraLoadTimes()
    assert arrivals.ms(MB, None) > arrivals.ms(MB, Tier.DISK) > arrivals.ms(MB, Tier.MEMORY) > 0
    arrivals.observe(arrived(Tier.MEMORY, 3.0))
    assert arrivals.ms(MB, Tier.MEMORY) == pytest.approx(3.0, rel=0.01)


@given(resident=st.dictionaries(st.sampled_from(list(Tier)), st.sets(st.sampled_from("abc"))))
def test_the_fastest_tier_of_each_lora_counts(resident: dict[Tier, set[str]]) -> None:
    found = fastest_tiers({tier: sorted(names) for tier, names in resident.items()})
    for name in "abc":
        tiers = [tier for tier, names in resident.items() if name in names]
        assert found.get(name) is max(tiers, key=TIERS.index, default=None)


loads = st.builds(
    RowLoad,
    steps=st.integers(1, 12),
    step_ms=st.floats(0.1, 9),
    first_ms=st.floats(0, 20),
    tokens=st.integers(1, 40),
)


@given(
    rows=st.lists(loads, max_size=7),
    running=st.integers(0, 7),
    new=loads,
    places=st.integers(1, 4),
    tokens=st.integers(20, 120),
)
def test_a_row_begins_when_it_has_a_place(
    rows: list[RowLoad], running: int, new: RowLoad, places: int, tokens: int
) -> None:
    backlog = WorkerLoad(places, 2.0, tuple(rows[:running]), tuple(rows[running:]), tokens)
    predicted = FinishEstimator(backlog).predict([new])
    alone = replace(backlog, waiting=(*backlog.waiting, new))
    begins, ends = alone.times_ms()
    assert predicted.begin_ms == pytest.approx(begins[-1], abs=1e-6)
    assert predicted.finish_ms == pytest.approx(ends[-1])
    moments = [0.0, *backlog.ends_ms()]
    assert min(abs(predicted.begin_ms - moment) for moment in moments) == pytest.approx(0, abs=1e-6)
    assert all(begin <= end for begin, end in zip(begins, ends, strict=True))


@given(begin=st.floats(0, 1e3), takes=st.floats(0, 1e3), ready=st.floats(0, 2e3), delay=st.floats(0, 1e3))
def test_only_what_waiting_for_a_place_does_not_hide_is_exposed(
    begin: float, takes: float, ready: float, delay: float
) -> None:
    found = PlacementEstimate(begin + takes, delay, begin).ready_after(ready)
    assert found.finish_ms == pytest.approx(max(begin, ready) + takes)
    assert found.delay_ms == delay


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.MEMORY, Tier.DISK])
def test_the_worker_that_has_the_lora_is_chosen_though_it_is_busier(tier: Tier) -> None:
    known = placement(having("a", None), having("b", tier, LORA, running=2), having("c", Tier.DISK, OTHER))
    assert choose(known, DEMAND) == "a"
    assert choose(known, replace(DEMAND, adapters=(LORA,))) == "b"


def test_what_the_host_tier_of_a_machine_has_counts_as_on_the_disks_of_its_workers() -> None:
    known, tiers = Placement(), HostTiers()
    change = TierChange(number=1, sha256=LORA.digest, size_bytes=LORA.size_bytes)
    tiers.observe(
        "i", HostTier(name="m", epoch=1, number=1, changes=(change,), budget_bytes=1 << 30, used_bytes=0)
    )
    known.hosts(tiers)
    for state in (having("a", None), telling(having("b", None, running=2), lora_host="m")):
        known.observe(state, 0)
    assert choose(known, DEMAND) == "a"
    assert choose(known, replace(DEMAND, adapters=(LORA,))) == "b"


def test_an_idle_worker_loads_the_lora_where_that_is_sooner_than_waiting() -> None:
    known = placement(having("a", None), having("b", Tier.DEVICE, LORA, running=4))
    small = NeededLora(LORA.digest, 1000)
    assert choose(known, replace(DEMAND, adapters=(small,))) == "a"
    assert choose(known, replace(DEMAND, adapters=(LORA,))) is None, "it waits for the worker that has it"


def test_a_load_that_waiting_for_a_place_hides_is_no_reason() -> None:
    """Both are full; where the place is free sooner, the LoRA is loaded by then."""
    known = placement(having("a", None, running=4), having("b", Tier.DEVICE, LORA, running=4))
    held = {
        c.instance: c for c in known.candidates(replace(DEMAND, adapters=(NeededLora(LORA.digest, 1000),)), 8)
    }
    assert held["a"].wait_ms > 0
    assert held["a"].prediction() == held["b"].prediction()


@pytest.mark.parametrize(("joins_within", "needing"), [(0.0, 1.0), (0.3, 0.7), (0.39, 0.7), (0.95, 0.1)])
def test_a_job_ends_after_its_virtual_run_or_its_wait_and_the_steps_that_need_adapters(
    joins_within: float, needing: float
) -> None:
    """A row takes 10 steps of 1.064 ms alone, and 0.064 ms more a step beside another one."""
    known = placement(having("idle", None), having("busy", None, running=1))
    arrivals = LoraLoadTimes()
    for wait_ms in (1.0, 9.0, 20.0):
        lora = NeededLora(LORA.digest, round(wait_ms / arrivals.ms(1, None)))
        asked = replace(DEMAND, adapters=(lora,), joins_within=joins_within)
        assert asked.needing == pytest.approx(needing)
        found = {c.instance: c for c in known.candidates(asked, 8)}
        for name, rows in (("idle", 1), ("busy", 2)):
            assert found[name].wait_ms == found[name].load_ms == pytest.approx(wait_ms, rel=1e-4)
            expected = max(10 + rows * 0.64, wait_ms + needing * 10.64)
            assert found[name].prediction().finish_ms == pytest.approx(expected, rel=1e-4)
    others_ms = [c.prediction().delay_ms for c in known.candidates(DEMAND, 8) if c.instance == "busy"]
    assert [found["busy"].prediction().delay_ms] == others_ms, "it waits beside the batch"


def test_rows_that_begin_without_their_loras_choose_by_loads_that_end_in_time_alone_by_their_weight() -> None:
    known = placement(
        having("a", None), having("b", Tier.MEMORY, LORA), having("c", Tier.MEMORY, LORA, running=1)
    )
    late = replace(DEMAND, adapters=(NeededLora(LORA.digest, 1000),), joins_within=0.5)
    found = {c.instance: c for c in known.candidates(late, 8)}
    finishes = {name: candidate.prediction().finish_ms for name, candidate in found.items()}
    assert finishes["a"] == finishes["b"] < finishes["c"]
    assert found["a"].load_ms > found["b"].load_ms > 0
    for load_weight in (0.0, 0.5):
        chosen = present(finish_time(list(found.values()), late, load_weight))
        assert chosen.instance == "b", "the rest decides among equals"


def test_a_small_delay_is_taken_for_an_adapter_that_is_held() -> None:
    """The load hides behind waiting for a place; on the other worker the job ends a little later, and loads nothing."""
    known = placement(having("a", None, running=4), having("b", Tier.DEVICE, LORA, running=4))
    known.assign("j", 1, "b", replace(DEMAND, shapes=(replace(SHAPE, steps=2),)), 0)
    asked = replace(DEMAND, adapters=(NeededLora(LORA.digest, round(9 / LoraLoadTimes().ms(1, None))),))
    a, b = sorted(known.candidates(asked, 8), key=lambda candidate: candidate.instance)
    costs = [c.prediction().finish_ms + c.prediction().delay_ms for c in (a, b)]
    assert a.load_ms == pytest.approx(9, rel=1e-4)
    assert b.load_ms == 0
    least = (costs[1] - costs[0]) / a.load_ms
    assert 0 < least < 1
    free = [c._replace(capacity_rows=9) for c in (a, b)]
    for load_weight, expected in ((0.9 * least, "a"), (1.1 * least, "b")):
        chosen = present(finish_time(free, asked, load_weight))
        assert chosen.instance == expected
        assert policy_of(SimPolicy.FINISH_TIME, load_weight)(free, asked) == chosen
        late = replace(asked, within_ms=0.001)
        assert policy_of(SimPolicy.DEADLINE_AWARE, load_weight)(free, late) == chosen, "none is in time"


def test_the_worker_that_was_told_to_load_has_a_lead() -> None:
    known = placement(having("a", None), having("b", None))
    demand = replace(DEMAND, adapters=(LORA, OTHER))
    known.fetch("b", demand, 0.0)
    later_s = LoraLoadTimes().ms(OTHER.size_bytes, None) / 1e3
    for name in ("a", "b"):
        known.observe(having(name, None), later_s)
    by_name = {c.instance: c for c in known.candidates(demand, 8)}
    assert by_name["b"].wait_ms == pytest.approx(LoraLoadTimes().ms(LORA.size_bytes, None))
    assert (by_name["b"].load_ms, by_name["b"].absent) == (0, ())
    assert by_name["a"].load_ms == pytest.approx(LoraLoadTimes().ms(LORA.size_bytes + OTHER.size_bytes, None))
    assert choose(known, demand) == "b"
    known.observe(having("b", Tier.DEVICE, LORA), later_s)
    (there,) = (c for c in known.candidates(demand, 8) if c.instance == "b")
    assert there.wait_ms == by_name["b"].wait_ms


@given(
    jobs=st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=3, unique=True), max_size=6),
    held=st.dictionaries(st.integers(0, 8), st.sampled_from(Tier)),
    lanes=st.integers(1, 3),
)
def test_what_is_waited_for_is_what_giving_the_job_begins(
    jobs: list[list[int]], held: dict[int, Tier], lanes: int
) -> None:
    """The wait of a candidate is when the last of its loads ends once it is given, whatever is under way."""
    loras = [NeededLora(f"{number:064x}", (number + 1) * MB) for number in range(9)]
    resident = {tier: tuple(loras[n].digest for n, own in held.items() if own is tier) for tier in Tier}
    known = placement(telling(having("a", None), adapter_lanes=lanes, adapters_resident=resident))
    for number, asked in enumerate(jobs):
        demand = replace(DEMAND, adapters=tuple(loras[n] for n in asked))
        (before,) = known.candidates(demand, 8)
        known.fetch("a", demand, 0.0)
        (after,) = known.candidates(demand, 8)
        assert after.wait_ms == pytest.approx(before.wait_ms), number
        assert after.load_ms == 0
        assert before.load_ms <= before.wait_ms


def test_a_new_load_waits_for_those_that_are_under_way() -> None:
    known = placement(having("a", None), having("b", None))
    hops_ms = LoraLoadTimes().ms(OTHER.size_bytes, None)
    for number in range(2 * LANES):
        lora = NeededLora(f"{number:064x}", OTHER.size_bytes)
        known.assign(f"j{number}", 1, "a", replace(DEMAND, adapters=(lora,)), now=0.0)
    found = {c.instance: c for c in known.candidates(replace(DEMAND, adapters=(LORA,)), 8)}
    assert found["a"].wait_ms - found["b"].wait_ms == pytest.approx(2 * hops_ms)
    assert found["a"].load_ms == found["b"].load_ms


def test_a_trial_leaves_no_loads_behind() -> None:
    known = placement(having("a", None))
    demand = replace(DEMAND, adapters=(LORA,))
    before = known.candidates(demand, 8)[0].wait_ms
    with known.trial() as count:
        count("j", "a", demand)
        assert known.candidates(demand, 8)[0].absent == ()
    (after,) = known.candidates(demand, 8)
    assert (after.wait_ms, len(after.absent)) == (before, 1)


def test_a_lora_that_no_worker_has_goes_to_one_worker_again_and_again() -> None:
    """Until telemetry tells that it is there; other LoRAs go to others."""
    known = placement(*(having(f"d{number}", None) for number in range(6)))
    homes = set()
    for number in range(12):
        lora = NeededLora(f"{number:064x}", 341 * MB)
        chosen = {choose(known, replace(DEMAND, adapters=(lora,), ticket=ticket)) for ticket in range(3)}
        assert len(chosen) == 1
        homes |= chosen
    assert len(homes) > 2


def test_a_rare_lora_does_not_keep_jobs_from_idle_workers() -> None:
    known = placement(*(having(f"d{number}", None) for number in range(3)))
    for number in range(300):  # no LoRA comes twice
        once = replace(DEMAND, adapters=(NeededLora(f"{number:064x}", LORA.size_bytes),))
        known.assign(f"j{number}", 1, "elsewhere", once, now=0)
        known.release(f"j{number}", 1)
    absent = [c.absent for c in known.candidates(replace(DEMAND, adapters=(LORA,)), 8)]
    saved = LoraLoadTimes().repeated_ms(LORA)
    assert all(0 <= ms < 0.01 * saved for each in absent for _, ms in each)


def test_workers_of_versions_that_tell_nothing_of_loras_are_candidates_that_have_none() -> None:
    old = worker("old")
    known = placement(old, having("new", Tier.DEVICE, LORA))
    demand = replace(DEMAND, adapters=(LORA,))
    by_name: dict[str, CandidateWorker] = {c.instance: c for c in known.candidates(demand, 8)}
    assert by_name["old"].wait_ms == pytest.approx(LoraLoadTimes().ms(LORA.size_bytes, None))
    assert by_name["new"].wait_ms == 0
    assert choose(known, demand) == "new"


def test_telemetry_without_residency_keeps_what_was_told_before() -> None:
    known = placement(having("a", Tier.DEVICE, LORA))
    known.observe(telling(having("a", Tier.DEVICE), adapters_resident=None), 1)
    assert known.candidates(replace(DEMAND, adapters=(LORA,)), 8)[0].wait_ms == 0


def test_loads_that_are_told_change_how_long_others_take() -> None:
    known = Placement()
    known.observe(telling(having("a", None), adapter_loads=(arrived(None, 50.0),) * 3), 0)
    candidate = known.candidates(replace(DEMAND, adapters=(LORA,)), 8)[0]
    assert candidate.wait_ms == pytest.approx(50 * LORA.size_bytes / MB, rel=0.05)


def test_a_controlnet_costs_the_worker_that_computes_it_itself() -> None:
    card = ControlCard(name="edges", digest="c", kind=ControlKind.FLUX, text_channels=8, weight_bytes=4000)
    known = placement(
        having("apart", None), having("within", None).model_copy(update={"controlnets": (card,)})
    )
    demand = replace(DEMAND, controls=(NeededControl("c", 0.5),))
    (controlled,) = (c for c in known.candidates(demand, 8) if c.instance == "within")
    (plainly,) = (c for c in known.candidates(DEMAND, 8) if c.instance == "within")
    added = controlled.loads[0].step_ms - plainly.loads[0].step_ms
    pace = known.estimates.pace("within")
    work = 2000 * (SHAPE.text + SHAPE.image)
    assert added == pytest.approx(pace.costs.compute[-1] * 0.5 * work)
    assert choose(known, demand) == "within", "the other can not compute it"
    assert choose(known, DEMAND) == "apart"  # by name: they are equals
    assert low_rank_weights(0, LORA.size_bytes) == LORA.size_bytes / 2


@pytest.mark.parametrize("shared", [True, False])
def test_sequences_share_what_a_controlnet_computes_of_one_or_have_each_its_own(shared: bool) -> None:
    """With classifier-free guidance, Flux has one computation for both; UNets and SD3 have two."""
    work = ControlWork(sequence=7, text=2, image=3, pair=0.5, text_pair=0.25, shared=shared)
    card = ControlCard(name="edges", digest="c", kind=ControlKind.FLUX, text_channels=8, work=work)
    known = placement(having("within", None).model_copy(update={"controlnets": (card,)}))
    pace = known.estimates.pace("within")
    guided = replace(SHAPE, text=6, image=20, computed=20, companions=4, sequences=2)
    one = 7 + 2 * 6 + 3 * 16 + 0.5 * 16**2 + 0.25 * (22**2 - 16**2)
    added = pace.controlled(guided, [NeededControl("c", 0.5), NeededControl("elsewhere", 1.0)])
    assert added.control * guided.sequences == pytest.approx(0.5 * one * (1 if shared else 2))


BASE = ControlBase(kind=ControlKind.FLUX, channels=(4,), latent_channels=4, token_pixels=16, text_channels=8)
NETS = ("a" * 64, "b" * 64, "c" * 64)
SOME_NETS = st.frozensets(st.sampled_from(NETS))


def cards(digests: frozenset[str]) -> tuple[ControlCard, ...]:
    return tuple(
        ControlCard(name=digest[:1], digest=digest, kind=ControlKind.FLUX, text_channels=8, weight_bytes=1000)
        for digest in sorted(digests)
    )


def controlling(
    name: str, digests: frozenset[str], running: int, base: ControlBase | None = None
) -> ServiceState:
    """A worker with ControlNets, and so many rows of ten steps; instances may compute others for its `base`."""
    rows = [row(f"{name}-{number}", 0, 10) for number in range(running)]
    return telling(worker(name, *rows, controlnets=cards(digests)), controlled=base)


def instance(name: str, digests: frozenset[str], **told: object) -> ServiceState:
    """One of the ControlNet service."""
    fields = {"controlnets": cards(digests), "control": ControlState(capacity_rows=8)} | told
    return state_of(ServiceName.CONTROLNET, name, **fields)


@given(st.lists(st.tuples(SOME_NETS, st.integers(0, 4)), max_size=6), SOME_NETS)
def test_workers_without_a_jobs_controlnets_are_as_if_they_were_not_there_while_another_has_them(
    fleet: list[tuple[frozenset[str], int]], asked: frozenset[str]
) -> None:
    states = [controlling(f"d{number}", *each) for number, each in enumerate(fleet)]
    demand = replace(DEMAND, controls=tuple(NeededControl(digest, 1.0) for digest in sorted(asked)))
    everyone = placement(*states)
    having = [state for state, (has, _) in zip(states, fleet, strict=True) if asked <= has]
    able = placement(*(having or states))
    names = [candidate.instance for candidate in able.candidates(DEMAND, 8)]
    assert [candidate.instance for candidate in everyone.candidates(demand, 8)] == names
    assert everyone.has_room(demand) == able.has_room(DEMAND)
    assert everyone.soonest(demand) == able.soonest(DEMAND)
    assert len(everyone.prospects(demand)) == len(able.prospects(DEMAND))


@given(
    own=SOME_NETS,
    offers=st.lists(st.tuples(SOME_NETS, st.booleans()), max_size=3),
    asked=SOME_NETS,
    asks=st.booleans(),
)
def test_a_worker_that_asks_has_what_one_instance_has(
    own: frozenset[str], offers: list[tuple[frozenset[str], bool]], asked: frozenset[str], asks: bool
) -> None:
    complete = controlling("other", frozenset(NETS), 9)
    known = placement(controlling("mine", own, 0, BASE if asks else None), complete)
    for number, (digests, draining) in enumerate(offers):
        known.observe(instance(f"c{number}", digests, draining=draining), 0)
    elsewhere = any(asked <= digests and not draining for digests, draining in offers)
    demand = replace(DEMAND, controls=tuple(NeededControl(digest, 1.0) for digest in sorted(asked)))
    names = {candidate.instance for candidate in known.candidates(demand, 8)}
    assert ("mine" in names) == (asked <= own or (asks and elsewhere))


def test_an_instance_that_falls_silent_offers_nothing() -> None:
    known = placement(controlling("mine", frozenset(), 0, BASE), controlling("other", frozenset(NETS), 9))
    known.observe(instance("c", frozenset(NETS)), 0)
    demand = replace(DEMAND, controls=(NeededControl(NETS[0], 1.0),))
    assert {candidate.instance for candidate in known.candidates(demand, 8)} == {"mine", "other"}
    for state in (controlling("mine", frozenset(), 0, BASE), controlling("other", frozenset(NETS), 9)):
        known.observe(state, SILENCE_S)
    known.expire(SILENCE_S + 1)
    assert {candidate.instance for candidate in known.candidates(demand, 8)} == {"other"}


def test_a_card_fits_a_network_of_its_kind_and_text() -> None:
    (card,) = cards(frozenset("a"))
    assert is_control_of(card, BASE)
    assert not is_control_of(card, BASE.model_copy(update={"text_channels": 16}))
    assert not is_control_of(card, BASE.model_copy(update={"kind": ControlKind.SD3}))
