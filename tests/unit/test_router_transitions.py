"""A job's record under every order of events that routers, workers and callers can produce; and where time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.errors import DeadlineExceeded, InternalError, JobCancelled
from giornata.jobs import ComputeTimes, JobRecord, JobState, RowState, StageTimes
from giornata_router import transitions
from giornata_router.ledger import Ledger
from giornata_router.transitions import Times
from tests.contract.messages import ENCODING, INSPECTION, JOB, REF

WHY = "the worker fell silent"
TIMES = Times(StageTimes(prepare=1), ComputeTimes(inspect=1), spent_ms=5)
TWO = JOB.model_copy(update={"parameters": JOB.parameters.model_copy(update={"n": 2})})
Step = Callable[[JobRecord], JobRecord | None]


def latents(record: JobRecord) -> JobRecord:
    rows = tuple(row.model_copy(update={"latents": REF}) for row in record.rows)
    return record.model_copy(update={"rows": rows, "owner": None})


def finished(record: JobRecord) -> JobRecord:
    rows = tuple(row.model_copy(update={"image": REF}) for row in record.rows)
    return transitions.ended(record, rows, TIMES)


STEPS: dict[str, Step] = {
    "prepare": lambda r: transitions.entered(r, JobState.PREPARING, TIMES),
    "assign": lambda r: transitions.assigned(r, "d1", INSPECTION, ENCODING, TIMES),
    "lose": lambda r: transitions.lost(r, r.attempt, WHY),
    "lose an older one": lambda r: transitions.lost(r, r.attempt - 1, WHY),
    "take back": lambda r: transitions.taken_back(r, r.attempt),
    "denoise": latents,
    "end": finished,
    "fail": lambda r: transitions.failed(r, DeadlineExceeded(), TIMES),
    "cancel": lambda r: transitions.cancelled(r, JobCancelled(), TIMES),
}


@given(st.lists(st.sampled_from(sorted(STEPS)), max_size=12))
def test_attempts_and_losses_only_grow_and_who_has_ended_has_no_owner(names: list[str]) -> None:
    record = transitions.accepted(TWO)
    for name in names:
        following = STEPS[name](record)
        if following is None:
            assert name in {"lose", "lose an older one", "take back"}
            continue
        assert following.attempt == record.attempt + (name == "assign")
        assert following.failures == record.failures + (name == "lose")
        assert [row.seed for row in following.rows] == [7, 8]
        if name == "lose":
            assert record.owner is not None, "what nobody has cannot be lost"
        if following.state.terminal:
            assert following.owner is None
            assert (following.error is None) is (following.state is JobState.COMPLETED)
            break
        record = following


def test_an_older_attempt_cannot_be_lost_or_taken_back() -> None:
    first = transitions.assigned(transitions.accepted(JOB), "d1", INSPECTION, ENCODING, TIMES)
    second = transitions.assigned(first, "d2", INSPECTION, ENCODING, TIMES)
    assert transitions.lost(second, 1, WHY) is None
    assert transitions.taken_back(second, 1) is None


def test_one_picture_completes_a_job_and_none_fails_it_with_the_first_error() -> None:
    record = transitions.accepted(TWO)
    error = InternalError("no luck").body()
    broken = record.rows[0].model_copy(update={"error": error})
    whole = record.rows[1].model_copy(update={"image": REF})
    assert transitions.ended(record, (broken, whole), TIMES).state is JobState.COMPLETED
    failed = transitions.ended(record, (broken, record.rows[1]), TIMES)
    assert (failed.state, failed.error) == (JobState.FAILED, error)


def test_a_demand_counts_only_what_is_still_to_be_computed() -> None:
    record = transitions.accepted(TWO)
    assert transitions.demand(record, INSPECTION, max_failures=3).steps == 8
    resumed = record.rows[0].model_copy(update={"resume": RowState(step=3, latents=REF)})
    done = record.rows[1].model_copy(update={"latents": REF})
    demand = transitions.demand(
        record.model_copy(update={"rows": (resumed, done)}), INSPECTION, max_failures=3
    )
    assert (demand.rows, demand.steps, demand.tokens) == (1, 1, INSPECTION.tokens)


def test_losses_up_to_the_limit_are_borne() -> None:
    record = transitions.accepted(JOB).model_copy(update={"failures": 2})
    assert transitions.exhausted(record, 3) is None
    error = transitions.exhausted(record.model_copy(update={"failures": 3}), 3)
    assert error is not None
    assert "3 workers" in error.message


def test_a_ledger_adds_to_what_others_have_summed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    record = transitions.accepted(JOB).model_copy(
        update={"stage_ms": StageTimes(prepare=10, queue=1), "spent_ms": 11}
    )
    ledger = Ledger(record, waited_ms=500)
    with contextlib.suppress(ValueError), ledger.timing("prepare"):
        now += 0.25
        raise ValueError
    ledger.compute("inspect", 3)
    times = ledger.times()
    assert times.stage_ms == StageTimes(prepare=260, queue=501)
    assert times.compute_ms.inspect == 3
    assert times.spent_ms == 11 + 500 + 250, "what was waited is spent"


@given(failures=st.integers(0, 4), limit=st.integers(1, 5))
def test_the_last_attempt_of_a_job_that_lost_all_others_is_made_alone(failures: int, limit: int) -> None:
    record = transitions.accepted(TWO).model_copy(update={"failures": failures})
    demand = transitions.demand(record, INSPECTION, max_failures=limit)
    assert demand.alone == (failures == limit - 1 and failures > 0)


def test_whoever_loses_too_many_attempts_is_told_how() -> None:
    record = transitions.accepted(JOB)
    for worker in ("d1", "d2"):
        record = transitions.assigned(record, worker, INSPECTION, ENCODING, TIMES)
        lost = transitions.lost(record, record.attempt, WHY)
        assert lost is not None
        record = lost
    assert transitions.exhausted(record, 3) is None
    error = transitions.exhausted(record, 2)
    assert error is not None
    assert error.received == f"attempt 1 on d1: {WHY}; attempt 2 on d2: {WHY}"
