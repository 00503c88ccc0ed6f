"""Asking prepost, again where that can help; an error that asking again cannot mend is raised at once.

While prepost is absent or full, an accepted job waits, as long as its budget lasts. After silence, a lost question or
an unexpected error prepost is asked a few times more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel
from tenacity import RetryCallState

from giornata import retries
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError, Overloaded
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job
from giornata.wire.messages import (
    EncodeRequest,
    FinishReply,
    FinishRequest,
    InspectRequest,
    Question,
    TemplateRequest,
    question,
)
from giornata.wire.templates import TemplateInputs, TemplateRecord
from giornata_router.config import RouterConfig
from giornata_router.questions import Questions

R = TypeVar("R", bound=BaseModel)


class PrepostClient:
    """Each question raises its own errors, and DeadlineExceeded where it stays unanswered."""

    def __init__(self, bus: Bus, questions: Questions, config: RouterConfig) -> None:
        self._bus, self._questions, self._config = bus, questions, config

    async def inspect(self, job: Job, deadline: Deadline) -> Inspection:
        """Decode and measure the job's pictures."""
        limit_s = self._config.inspect_s
        request = InspectRequest(job=job, remaining_ms=deadline.at_most(limit_s).remaining_ms())
        return await self._ask(subjects.prepost("inspect", job.model), request, Inspection, limit_s, deadline)

    async def encode(self, job: Job, inspection: Inspection, deadline: Deadline) -> Encoding:
        """Make the conditioning of all rows."""
        limit_s = self._config.encode_s
        remaining_ms = deadline.at_most(limit_s).remaining_ms()
        request = EncodeRequest(job=job, inspection=inspection, remaining_ms=remaining_ms)
        return await self._ask(subjects.prepost("encode", job.model), request, Encoding, limit_s, deadline)

    async def finish(
        self, job: Job, inspection: Inspection, index: int, latents: BlobRef, deadline: Deadline
    ) -> FinishReply:
        """Decode and paste one picture."""
        limit_s = self._config.finish_s
        request = FinishRequest(
            job=job,
            inspection=inspection,
            index=index,
            latents=latents,
            remaining_ms=deadline.at_most(limit_s).remaining_ms(),
        )
        return await self._ask(subjects.prepost("finish", job.model), request, FinishReply, limit_s, deadline)

    async def template(self, template: TemplateRecord, deadline: Deadline) -> TemplateInputs:
        """Decode and encode a template's picture, from which its run begins."""
        limit_s = self._config.encode_s
        request = TemplateRequest(template=template, remaining_ms=deadline.at_most(limit_s).remaining_ms())
        return await self._ask(
            subjects.prepost("template", template.model), request, TemplateInputs, limit_s, deadline
        )

    async def _ask(
        self, subject: str, request: Question, reply: type[R], limit_s: float, deadline: Deadline
    ) -> R:
        async def ask_once() -> R:
            async with self._questions.asked(question(request)):
                return await self._bus.call(subject, request, reply, deadline.at_most(limit_s))

        return await retries.elsewhere(_worth_another_try, _after_faults(self._config.stage_tries))(ask_once)


def _after_faults(limit: int) -> Callable[[RetryCallState], bool]:
    """Stop at the `limit`-th try that failed otherwise than by prepost being absent or full."""
    faults = 0

    def stop(state: RetryCallState) -> bool:
        nonlocal faults
        error = state.outcome.exception() if state.outcome else None
        faults += not isinstance(error, Overloaded)
        return faults >= limit

    return stop


def _worth_another_try(error: BaseException) -> bool:
    """A stage's own time limit counts as silence; the job's deadline ends the walk from outside."""
    return isinstance(error, GiornataError) and (error.retryable or isinstance(error, DeadlineExceeded))
