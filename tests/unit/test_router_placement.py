"""Choosing a worker: telemetry, what it does not show yet, and who fell silent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.fleet import SILENCE_S
from giornata.workers import RowProgress, ServiceName, ServiceState, WorkerState
from giornata_router.placement import UNLISTED_S, Placement
from giornata_router.policy import POLICIES, Candidate, Demand, fewest_rows, least_remaining_steps
from tests.fakes.fleet import CARD

DEMAND = Demand(model=CARD.name, model_digest=CARD.digest, rows=1, tokens=16, steps=10)


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


def row(job: str, step: int, steps: int, attempt: int = 1) -> RowProgress:
    return RowProgress(job_id=job, attempt=attempt, index=0, step=step, steps=steps, tokens=16)


def placement(*states: ServiceState) -> Placement:
    made = Placement(least_remaining_steps)
    for state in states:
        made.observe(state, 0)
    return made


def test_the_worker_that_is_done_soonest_is_chosen_not_the_one_with_fewest_rows() -> None:
    states = worker("long", row("a", 0, 50)), worker("short", row("b", 9, 10), row("c", 8, 10))
    assert placement(*states).choose(DEMAND) == "short"
    counted = Placement(fewest_rows)
    for state in states:
        counted.observe(state, 0)
    assert counted.choose(DEMAND) == "long"


def test_a_burst_between_two_telemetry_messages_is_spread() -> None:
    fleet = placement(worker("d1"), worker("d2"), worker("d3"))
    chosen = []
    for i in range(6):
        name = fleet.choose(DEMAND)
        assert name is not None
        fleet.assign(f"j{i}", 1, name, DEMAND, now=0)
        chosen.append(name)
    assert sorted(chosen) == ["d1", "d1", "d2", "d2", "d3", "d3"]


def test_an_assignment_counts_once_when_telemetry_shows_it() -> None:
    fleet = placement(worker("d1"), worker("d2", row("x", 0, 11)))
    fleet.assign("j", 1, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("j", 0, 10)), 1)
    assert fleet.choose(DEMAND) == "d1", "10 steps on d1, not 20"


def test_no_worker_of_the_model_or_with_room_is_none() -> None:
    other = CARD.model_copy(update={"digest": "other"})
    assert placement(worker("d1", models=(other,))).choose(DEMAND) is None
    assert placement(worker("d1", row("a", 0, 9), capacity=1)).choose(DEMAND) is None
    assert placement(worker("d1", draining=True)).choose(DEMAND) is None
    assert placement(worker("d1")).choose(DEMAND, excluded={"d1"}) is None


def test_a_job_larger_than_every_worker_goes_to_an_empty_one() -> None:
    large = Demand(model=CARD.name, model_digest=CARD.digest, rows=9, tokens=1, steps=1)
    assert placement(worker("busy", row("a", 0, 9)), worker("empty")).choose(large) == "empty"


def test_silence_and_forgetting_are_noticed() -> None:
    fleet = placement(worker("d1"), worker("d2"))
    fleet.assign("a", 1, "d1", DEMAND, now=0)
    fleet.assign("b", 1, "d2", DEMAND, now=0)
    fleet.observe(worker("d2"), SILENCE_S)
    assert [lost.job_id for lost in fleet.expire(SILENCE_S + 0.1)] == ["a"]
    fleet.observe(worker("d2"), UNLISTED_S + 0.1)
    assert [doubt.job_id for doubt in fleet.doubtful(UNLISTED_S + 0.1)] == ["b"]
    fleet.observe(worker("d2", row("b", 1, 9)), UNLISTED_S + 0.2)
    assert fleet.doubtful(UNLISTED_S + 0.2) == []


def test_an_older_attempt_does_not_vouch_for_a_newer_one() -> None:
    fleet = placement(worker("d1"))
    fleet.assign("a", 2, "d1", DEMAND, now=0)
    fleet.observe(worker("d1", row("a", 1, 9, attempt=1)), UNLISTED_S + 1)
    assert [doubt.attempt for doubt in fleet.doubtful(UNLISTED_S + 1)] == [2]


candidates = st.lists(
    st.builds(
        Candidate,
        instance=st.text("abc", min_size=1, max_size=3),
        capacity_rows=st.integers(0, 8),
        rows=st.integers(0, 10),
        tokens=st.integers(0, 1000),
        remaining_steps=st.integers(0, 500),
    ),
    max_size=6,
)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@given(candidates=candidates, rows=st.integers(1, 10))
def test_a_policy_picks_one_with_room_whenever_there_is_one(
    policy: object, candidates: list[Candidate], rows: int
) -> None:
    demand = Demand(model="m", model_digest="d", rows=rows, tokens=1, steps=1)
    chosen = policy(candidates, demand)  # type: ignore[operator]  # a policy
    room = [c for c in candidates if c.rows == 0 or c.rows + rows <= c.capacity_rows]
    assert (chosen is None) == (not room)
    if chosen is not None:
        assert chosen in room
        if policy is least_remaining_steps:
            assert chosen.remaining_steps == min(c.remaining_steps for c in room)
        else:
            assert chosen.rows == min(c.rows for c in room)


def test_a_preferred_worker_is_chosen_while_it_has_room() -> None:
    made = placement(worker("idle"), worker("busy", row("a", 0, 50), capacity=2))
    assert made.choose(DEMAND) == "idle"
    assert made.choose(DEMAND, preferred="busy") == "busy"
    assert made.choose(DEMAND, {"busy"}, preferred="busy") == "idle"
    assert made.choose(DEMAND, preferred="gone") == "idle"
    made.assign("b", 1, "busy", DEMAND, 0)
    assert made.choose(DEMAND, preferred="busy") == "idle"
