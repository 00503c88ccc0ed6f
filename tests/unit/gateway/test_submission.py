"""To which cells a job is offered: to the next one where a cell surely has no room, and nowhere else in doubt."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from giornata.bus.bus import Bus
from giornata.wire import subjects
from giornata.wire.cells import MAIN, in_cell
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    QueueFull,
    ServiceUnavailable,
    StorageFull,
    StoreFull,
    TenantQueueFull,
)
from giornata_gateway.cells import choice
from giornata_gateway.jobs.submission import Submission
from tests.contract.messages import JOB
from tests.fakes import virtual_time

WINDOW_S = 10.0
WAITS_MS = {MAIN: 0.0, "other": 0.0}
EDIT = JOB.model_copy(update={"fingerprint": None})
CELLS = {in_cell(subjects.SUBMIT, cell): cell for cell in WAITS_MS}
FIRST, NEXT = choice.by_wait(EDIT.tenant, WAITS_MS)


class Routers:
    """Answers of the routers that are asked, in order; None accepts. The last one is given again."""

    def __init__(self, answers: Sequence[GiornataError | None], full: GiornataError | None = None) -> None:
        self._answers, self._full = [*answers], full
        self.asked: list[str] = []

    async def call(self, subject: str, *_: object) -> None:
        self.asked.append(CELLS[subject])
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if answer is not None:
            raise answer

    async def full_for(self, cell: str, *, afresh: bool = False) -> GiornataError | None:
        """Why the streams of a cell take nothing, found out when a router has not answered."""
        return self._full if afresh else None


def offered(routers: Routers) -> tuple[list[str], GiornataError | None, set[str]]:
    """The cells that were asked, in order, the outcome, and the doubtful jobs."""

    async def nothing(*_: Any) -> None:
        """A record or a picture."""

    submission = Submission(
        config=cast("Any", SimpleNamespace(submit_window_s=WINDOW_S)),
        bus=cast("Bus", routers),
        fleet=cast("Any", SimpleNamespace(waits_ms=lambda *_: WAITS_MS)),
        ledger=cast("Any", SimpleNamespace(records=SimpleNamespace(open=nothing, remember=lambda *_: None))),
        storage=cast("Any", routers),
        preparation=cast("Any", SimpleNamespace(forget=nothing)),
        ends=cast("Any", None),
        tasks=cast("asyncio.TaskGroup", None),
        given_up=lambda _: None,
    )
    error = virtual_time.run(submission._ask_router(EDIT))
    return routers.asked, error, submission.doubtful


@pytest.mark.parametrize("refused", [QueueFull, TenantQueueFull, StoreFull])
def test_a_cell_without_room_leaves_a_job_to_the_next(refused: type[GiornataError]) -> None:
    assert offered(Routers([refused(), None])) == ([FIRST, NEXT], None, set())


def test_a_job_that_a_router_may_have_accepted_is_offered_to_no_other_cell() -> None:
    """The first router has queued it and died, and the one after it has no room: else there are two jobs."""
    asked, error, doubtful = offered(Routers([DeadlineExceeded(), QueueFull()]))
    assert asked == [FIRST, FIRST]
    assert isinstance(error, QueueFull)
    assert doubtful == {EDIT.job_id}


def test_nor_is_one_whose_cell_is_found_full_without_an_answer() -> None:
    asked, error, doubtful = offered(Routers([DeadlineExceeded(), None], full=StorageFull()))
    assert asked == [FIRST]
    assert isinstance(error, StorageFull)
    assert doubtful == {EDIT.job_id}


def test_a_router_that_is_away_for_a_moment_gets_the_job_and_no_doubt_stays() -> None:
    assert offered(Routers([ServiceUnavailable(), DeadlineExceeded(), None])) == ([FIRST] * 3, None, set())


def test_a_refusal_that_another_cell_shares_is_told_at_once() -> None:
    asked, error, _ = offered(Routers([GiornataError(), None]))
    assert asked == [FIRST]
    assert isinstance(error, GiornataError)
