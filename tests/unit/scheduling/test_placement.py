"""Choosing a worker: telemetry, what it does not show yet, and who fell silent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giornata.fleet import SILENCE_S
from giornata.scheduling.demand import JobDemand, RowShape
from giornata.scheduling.placement import ModelSlack, Placement, StallTimeout
from giornata.scheduling.policies import Policy, finish_time
from giornata.scheduling.scheduler import LOOKED_AT
from giornata.wire.workers import (
    LoadSample,
    RowProgress,
    ServiceName,
    ServiceState,
    TemplateCounters,
    Tier,
    WorkerState,
)
from giornata_lab.bench.systems.networks import plain
from giornata_lab.simulation.baselines import request_level
from tests.fakes.fleet import CARD, worker_costs

SHAPE = RowShape(text=0, image=16, computed=16, steps=10)
DEMAND = JobDemand(CARD.name, CARD.digest, (SHAPE,))


def worker(name: str, *rows: RowProgress, capacity: int = 4, **fields: object) -> ServiceState:
    state = ServiceState(
        service=ServiceName.DENOISER,
        instance=name,
        host="h",
        version="0.1.0",
        ready=True,
        models=(CARD,),
        worker=WorkerState(capacity_rows=capacity, capacity_tokens=1000, running=rows),
    )
    return state.model_copy(update=fields)


def telling(state: ServiceState, **fields: object) -> ServiceState:
    """The same, of a worker that tells these fields, too."""
    assert state.worker is not None
    return state.model_copy(update={"worker": state.worker.model_copy(update=fields)})


def row(job: str, step: int, steps: int, attempt: int = 1) -> RowProgress:
    return RowProgress(job_id=job, attempt=attempt, index=0, step=step, steps=steps, tokens=16)


def placement(*states: ServiceState) -> Placement:
    made = Placement()
    for state in states:
        made.observe(state, 0)
    return made


def choose(known: Placement, demand: JobDemand, policy: Policy = finish_time) -> str | None:
    chosen = policy(known.candidates(demand, LOOKED_AT), demand)
    return chosen.instance if chosen else None


def test_the_worker_that_is_done_soonest_is_chosen_not_the_one_with_request_level() -> None:
    known = placement(worker("long", row("a", 0, 50)), worker("short", row("b", 9, 10), row("c", 8, 10)))
    assert choose(known, DEMAND) == "short"
    assert choose(known, DEMAND, request_level) == "long"


def test_a_burst_between_two_telemetry_messages_is_spread() -> None:
    fleet = placement(worker("d1"), worker("d2"), worker("d3"))
    chosen = []
    for i in range(6):
        name = choose(fleet, DEMAND)
        assert name is not None
        fleet.assign(f"j{i}", 1, name, DEMAND, now=0)
        chosen.append(name)
    assert sorted(chosen) == ["d1", "d1", "d2", "d2", "d3", "d3"]


def test_an_assignment_counts_once_when_telemetry_shows_it() -> None:
    fleet = placement(worker("d1"), worker("d2", row("x", 0, 11), row("y", 9, 10)))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("j", 0, 10)), 1)
    assert choose(fleet, DEMAND) == "d1", "10 steps on d1, not 20"


@pytest.mark.parametrize(
    ("told", "steps"),
    [
        ({"encoded": False}, 10),
        ({"encoded": True}, 2),
        ({}, 10),  # of a version that tells of no inputs while there are no text tokens
        ({"text_tokens": 5}, 2),
    ],
)
def test_a_row_counts_as_it_was_asked_for_until_its_inputs_are_there(
    told: dict[str, object], steps: int
) -> None:
    fleet = placement(worker("d1"))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("j", 0, 2).model_copy(update=told)), 1)
    [candidate] = fleet.candidates(DEMAND, LOOKED_AT)
    assert [load.steps for load in candidate.outlook.backlog.running] == [steps]


def test_companions_cost_a_step_in_full_and_no_other() -> None:
    whole, twin, masked = (
        row("j", 0, 10).model_copy(update={"encoded": True, "begun": True, **fields})
        for fields in (
            {"companion_tokens": 16},
            {"tokens": 32},
            {"companion_tokens": 16, "computed_tokens": 4},
        )
    )
    costs = []
    for told in (whole, twin, masked):
        [candidate] = placement(worker("d1", told)).candidates(DEMAND, LOOKED_AT)
        costs.append([load.step_ms for load in candidate.outlook.backlog.running])
    assert costs == [[32], [32], [4]]


def test_no_worker_of_the_model_or_with_room_is_none() -> None:
    other = CARD.model_copy(update={"digest": "other"})
    assert choose(placement(worker("d1", models=(other,))), DEMAND) is None
    assert choose(placement(worker("d1", row("a", 0, 9), capacity=1)), DEMAND) is None
    assert choose(placement(worker("d1", draining=True)), DEMAND) is None
    assert placement(worker("d1")).candidates(DEMAND, LOOKED_AT, excluded={"d1"}) == []


def test_a_job_larger_than_every_worker_goes_to_an_empty_one() -> None:
    large = JobDemand(CARD.name, CARD.digest, (SHAPE,) * 9)
    assert choose(placement(worker("busy", row("a", 0, 9)), worker("empty")), large) == "empty"


def test_silence_and_forgetting_are_noticed() -> None:
    fleet = placement(worker("d1"), worker("d2"))
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    fleet.assign("b", 1, "d2", DEMAND, now=0)
    fleet.observe(worker("d2"), SILENCE_S)
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]
    fleet.observe(worker("d2"), SILENCE_S + 0.1)
    assert [doubt.key[0] for doubt in fleet.unlisted()] == ["b"]
    fleet.observe(worker("d2", row("b", 1, 9)), SILENCE_S + 0.2)
    assert fleet.unlisted() == []


def test_rows_of_a_worker_that_fell_silent_are_not_doubted_but_lost() -> None:
    fleet = placement(worker("d1"))
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1"), 0.1)
    late = SILENCE_S + 0.05
    assert fleet.expire(late) == fleet.unlisted() == [], "all that is known is that the worker is silent"
    assert [lost.key[0] for lost in fleet.expire(late + 0.1)] == ["a"]


def test_rows_of_a_worker_that_was_not_heard_yet_are_waited_for() -> None:
    """A router that has just started adopts rows before it has heard of their workers."""
    fleet = placement()
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    assert fleet.expire(SILENCE_S) == []
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]
    fleet.assign("b", 1, "d2", DEMAND, now=0)
    fleet.observe(worker("d2"), SILENCE_S)
    assert [lost.key[0] for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]


def test_an_older_attempt_does_not_vouch_for_a_newer_one() -> None:
    fleet = placement(worker("d1"))
    fleet.assign("a", 2, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("a", 1, 9, attempt=1)), SILENCE_S + 1)
    assert [doubt.key[1] for doubt in fleet.unlisted()] == [2]


def test_a_worker_whose_step_does_not_end_gets_nothing_until_it_does() -> None:
    fleet = Placement(patience=StallTimeout(factor=10.0, least_ms=1000.0))
    fleet.observe(worker("d1", row("j", 0, 10)), 0)
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert fleet.stalled() == []
    fleet.observe(stepping("d1", 900.0), 1)
    assert fleet.stalled() == [], "shorter than the least patience"
    fleet.observe(stepping("d1", 1100.0), 2)
    assert [a.key[0] for a in fleet.stalled()] == ["j"]
    assert choose(fleet, DEMAND) is None
    fleet.observe(stepping("d1", 5.0), 3)
    assert fleet.stalled() == []
    assert choose(fleet, DEMAND) == "d1"


def test_patience_grows_with_what_a_step_was_predicted_to_take() -> None:
    fleet = Placement(patience=StallTimeout(factor=100.0, least_ms=1000.0))
    fleet.observe(stepping("d1", 1100.0), 0)  # 16 ms predicted
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert fleet.stalled() == []
    fleet.observe(stepping("d1", 1700.0), 1)
    assert [a.key[0] for a in fleet.stalled()] == ["j"]


def test_a_job_that_the_message_lists_first_counts_once_in_what_a_step_was_predicted_to_take() -> None:
    fleet = Placement(patience=StallTimeout(factor=50.0, least_ms=1000.0))
    fleet.observe(worker("d1"), 0)
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(stepping("d1", 1100.0), 1)  # 16 ms predicted for one row, 32 for two
    assert [a.key[0] for a in fleet.stalled()] == ["j"]
    fleet.observe(stepping("d1", 700.0), 2)
    assert fleet.finish_ms("j") == pytest.approx(160.0), "10 steps of one row"


def test_what_was_reported_counts_no_more_though_telemetry_lists_it_still() -> None:
    fleet = placement(worker("d1", row("j", 9, 10), capacity=1))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    assert choose(fleet, DEMAND) is None
    fleet.release("j", 1)
    assert choose(fleet, DEMAND) == "d1"
    fleet.observe(worker("d1", row("j", 9, 10), capacity=1), 1)
    assert choose(fleet, DEMAND) == "d1", "the same message, sent twice"
    fleet.observe(worker("d1", row("k", 0, 10), capacity=1), 2)
    assert choose(fleet, DEMAND) is None


def stepping(name: str, ms: float) -> ServiceState:
    return telling(worker(name, row("j", 0, 10)), stepping_ms=ms)


def test_a_worker_keeps_the_templates_that_it_told_last() -> None:
    fleet, asked = Placement(), replace(DEMAND, template="t")

    def tell(**fields: object) -> list[Tier | None]:
        fleet.observe(telling(worker("d1"), **fields), 0)
        return [candidate.template for candidate in fleet.candidates(asked, LOOKED_AT)]

    assert tell(resident={Tier.DISK: ("t", "u")}) == [Tier.DISK]
    assert tell(resident=None) == [Tier.DISK]
    assert tell(resident={Tier.MEMORY: ("t",), Tier.DISK: ("t",)}) == [Tier.MEMORY]
    assert tell(resident=None) == [Tier.MEMORY]
    assert tell(resident={}) == [None]


def test_telemetry_says_whether_rows_that_wait_may_go_to_its_worker() -> None:
    fleet = Placement()
    assert fleet.observe(worker("d1", row("a", 1, 9), capacity=2), 0)
    assert not fleet.observe(worker("d1", row("a", 1, 9), row("b", 1, 9), capacity=2), 0)
    fleet.release("b", 1)
    assert not fleet.observe(worker("d2", capacity=2, draining=True), 0)
    fleet.assign("c", 1, "d3", DEMAND, 0)
    assert fleet.observe(worker("d3", capacity=1), 0), "nothing was known of it when the row was assigned"
    fleet.assign("e", 1, "d3", DEMAND, 0)
    assert not fleet.observe(worker("d3", capacity=1), 0), "an assignment counts that is not listed yet"


def test_reading_a_template_from_disk_takes_what_reads_have_taken() -> None:
    fleet = Placement()
    for name, tier in (("d1", Tier.DISK), ("d2", Tier.MEMORY)):
        state = telling(
            worker(name),
            blocks=plain(1),
            cost_model=worker_costs(0.0, 0.0, 1.0),
            loads=(LoadSample(tier=Tier.DISK, size_bytes=1000, load_ms=5.0),),
            resident={tier: ("t", "u")},
            templates=TemplateCounters(disk_bytes=4000),
        )
        fleet.observe(state, 0)
    asked = replace(DEMAND, template="t")
    assert {c.instance: (c.template, c.fetch_ms) for c in fleet.candidates(asked, LOOKED_AT)} == {
        "d1": (Tier.DISK, pytest.approx(10.0)),
        "d2": (Tier.MEMORY, 0.0),
    }
    found = fleet.candidates(asked, LOOKED_AT, fetching="d1")
    assert {c.instance: c.fetch_ms for c in found} == {"d1": 0.0, "d2": 0.0}, "it is being read there"


def test_token_level_balancing_counts_masked_tokens() -> None:
    whole, masked = row("a", 0, 10), row("b", 0, 10).model_copy(update={"computed_tokens": 2})
    known = placement(worker("whole", whole), worker("masked", masked))
    known.assign("c", 1, "masked", replace(DEMAND, shapes=(replace(SHAPE, computed=3),)), now=0)
    found = {c.instance: c.tokens for c in known.candidates(DEMAND, LOOKED_AT)}
    assert found == {"whole": 16, "masked": 5}


@pytest.mark.parametrize(
    ("slack", "waiting", "rows"),
    [(0.05, 0, 3), (0.0, 0, 8), (0.2, 0, 2), (0.2, 4, 2), (0.2, 12, 3), (0.2, 80, 6), (0.0, 80, 8)],
)
def test_a_worker_gets_no_more_rows_than_make_it_faster_and_more_where_many_wait(
    slack: float, waiting: int, rows: int
) -> None:
    known = Placement(slack=slack)
    costs = worker_costs(1.0, 0.0, 5 / 16)
    known.observe(telling(worker("d", capacity=8), blocks=plain(1), cost_model=costs), 0)
    known.assign("before", 1, "d", DEMAND, now=0)
    model, other = (DEMAND.model, DEMAND.model_digest), ("another", "model")
    known.heed({model: waiting, other: 1000})
    given_rows = 1
    while known.has_room(DEMAND) and choose(known, DEMAND) == "d":
        known.assign(f"j{given_rows}", 1, "d", DEMAND, now=0)
        given_rows += 1
    assert given_rows == rows
    assert choose(known, DEMAND) is None


def test_places_of_a_worker_that_is_gone_make_no_waiting_row_count_less() -> None:
    """Forty rows wait for eight places, or for eighty as long as the other worker lives."""
    served = {(DEMAND.model, DEMAND.model_digest): 40}
    known = Placement(slack=0.2)
    known.observe(worker("gone", capacity=72), 0)
    known.observe(worker("d", capacity=8), later := SILENCE_S + 1)
    known.heed(served)
    assert known._slacks.of(served) == pytest.approx(0.2 / 2)
    known.expire(later)
    known.heed(served)
    assert known._slacks.of(served) == pytest.approx(0.2 / 11)
    known.observe(worker("d", capacity=20), later)
    known.heed(served)
    assert known._slacks.of(served) == pytest.approx(0.2 / 5)


def test_only_rows_of_its_own_models_let_a_worker_take_more() -> None:
    """Half of the slack where half as many rows wait as there are places; that of the longest line where it has two."""
    one, other = ("one", "digest"), ("other", "digest")
    slacks = ModelSlack(0.1)
    slacks.count([one], 8)
    slacks.count([one, other], 8)
    assert slacks.heed({one: 8}) == {one}
    assert [slacks.of(models) for models in ([one], [other], [other, one], [])] == [0.05, 0.1, 0.05, 0.1]
    assert slacks.heed({one: 8, other: 80}) == {other}
    assert slacks.of([one]) == 0.05
    assert slacks.heed({one: 9, other: 80}) == set(), "about as many"
    slacks.count([one, other], -8)
    assert slacks.heed({one: 8}) == {one, other}
    assert slacks.of([one]) == pytest.approx(0.1 / 3)
    assert slacks.of([other]) == 0.1
    slacks.count([one], -8)
    slacks.heed({one: 2})
    assert slacks.of([one]) == pytest.approx(0.1 / 5), "without workers, as if there were one place"
