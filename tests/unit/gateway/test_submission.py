"""How a job is offered to the router: again while it does not answer, and in doubt its pictures stay."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    QueueFull,
    ServiceUnavailable,
    StorageFull,
    StoreFull,
    TenantQueueFull,
)
from giornata_gateway.jobs.submission import JobSubmitter
from tests.contract.messages import JOB
from tests.fakes import virtual_time

WINDOW_S = 10.0
EDIT = JOB.model_copy(update={"fingerprint": None})


class Routers:
    """Answers of the routers that are asked, in order; None accepts. The last one is given again."""

    def __init__(self, answers: Sequence[GiornataError | None], full: GiornataError | None = None) -> None:
        self._answers, self._full = [*answers], full
        self.asked: list[str] = []

    async def call(self, subject: str, *_: object) -> None:
        self.asked.append(subject)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is not None:
            raise answer

    async def full_for_jobs(self, *, afresh: bool = False) -> GiornataError | None:
        """Why the streams take nothing, found out when a router has not answered."""
        return self._full if afresh else None


def offered(routers: Routers) -> tuple[list[str], GiornataError | None, set[str]]:
    """The subjects that were asked, in order, the outcome, and the doubtful jobs."""

    async def nothing(*_: Any) -> None:
        """A record or a picture."""

    submission = JobSubmitter(
        config=cast("Any", SimpleNamespace(submit_window_s=WINDOW_S)),
        bus=cast("Bus", routers),
        fleet=cast("Any", SimpleNamespace(serves=lambda *_: True)),
        ledger=cast("Any", None),
        storage=cast("Any", routers),
        preparation=cast("Any", SimpleNamespace(forget=nothing)),
        ends=cast("Any", None),
        tasks=cast("asyncio.TaskGroup", None),
        given_up=lambda _: None,
    )
    error = virtual_time.run(submission._ask_router(EDIT))
    return routers.asked, error, submission.doubtful


@pytest.mark.parametrize("refused", [QueueFull, TenantQueueFull, StoreFull])
def test_a_refusal_for_want_of_room_is_told_without_doubt(refused: type[GiornataError]) -> None:
    asked, error, doubtful = offered(Routers([refused(), None]))
    assert (asked, doubtful) == ([subjects.SUBMIT], set())
    assert isinstance(error, refused)


def test_a_job_that_a_router_may_have_accepted_stays_in_doubt() -> None:
    """The first router has queued it and died, and the one after it has no room: else there are two jobs."""
    asked, error, doubtful = offered(Routers([DeadlineExceeded(), QueueFull()]))
    assert asked == [subjects.SUBMIT] * 2
    assert isinstance(error, QueueFull)
    assert doubtful == {EDIT.job_id}


def test_streams_that_are_found_full_without_an_answer_end_the_tries() -> None:
    asked, error, doubtful = offered(Routers([DeadlineExceeded(), None], full=StorageFull()))
    assert asked == [subjects.SUBMIT]
    assert isinstance(error, StorageFull)
    assert doubtful == {EDIT.job_id}


def test_a_router_that_is_away_for_a_moment_gets_the_job_and_no_doubt_stays() -> None:
    assert offered(Routers([ServiceUnavailable(), DeadlineExceeded(), None])) == (
        [subjects.SUBMIT] * 3,
        None,
        set(),
    )


def test_another_refusal_is_told_at_once() -> None:
    asked, error, _ = offered(Routers([GiornataError(), None]))
    assert asked == [subjects.SUBMIT]
    assert isinstance(error, GiornataError)
