"""Asking prepost, again where that can help; what cannot be mended by asking again is raised at once.

Nobody there, or no room: an accepted job waits, as long as its budget lasts. Silence, a question that was lost or an
unexpected error: a few tries.
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


class Stages:
    """The questions to prepost."""

    def __init__(self, bus: Bus, config: RouterConfig) -> None:
        self.questions = Questions(lambda: bus.client.is_connected)
        self._bus = bus
        self._config = config

    async def inspect(self, job: Job, deadline: Deadline) -> Inspection:
        """Decode and measure the job's pictures."""
        limit = deadline.at_most(self._config.inspect_s)
        request = InspectRequest(job=job, remaining_ms=limit.remaining_ms())
        return await self._ask(
            subjects.prepost("inspect", job.model), request, Inspection, self._config.inspect_s, deadline
        )

    async def encode(self, job: Job, inspection: Inspection, deadline: Deadline) -> Encoding:
        """Conditioning of all rows."""
        limit = deadline.at_most(self._config.encode_s)
        request = EncodeRequest(job=job, inspection=inspection, remaining_ms=limit.remaining_ms())
        return await self._ask(
            subjects.prepost("encode", job.model), request, Encoding, self._config.encode_s, deadline
        )

    async def finish(
        self, job: Job, inspection: Inspection, index: int, latents: BlobRef, deadline: Deadline
    ) -> FinishReply:
        """Decode and paste one picture."""
        limit = deadline.at_most(self._config.finish_s)
        request = FinishRequest(
            job=job, inspection=inspection, index=index, latents=latents, remaining_ms=limit.remaining_ms()
        )
        return await self._ask(
            subjects.prepost("finish", job.model), request, FinishReply, self._config.finish_s, deadline
        )

    async def template(self, template: TemplateRecord, deadline: Deadline) -> TemplateInputs:
        """Decode and encode a template's picture: what a run begins from."""
        limit = deadline.at_most(self._config.encode_s)
        request = TemplateRequest(template=template, remaining_ms=limit.remaining_ms())
        return await self._ask(
            subjects.prepost("template", template.model),
            request,
            TemplateInputs,
            self._config.encode_s,
            deadline,
        )

    async def _ask(
        self, subject: str, request: Question, reply: type[R], limit_s: float, deadline: Deadline
    ) -> R:
        async def ask_once() -> R:
            async with self.questions.asked(question(request)):
                return await self._bus.call(subject, request, reply, deadline.at_most(limit_s))

        return await retries.elsewhere(_worth_another_try, _after_faults(self._config.stage_tries))(ask_once)


def _after_faults(limit: int) -> Callable[[RetryCallState], bool]:
    """Stop at the `limit`-th try that failed otherwise than by nobody being there or having room."""
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
