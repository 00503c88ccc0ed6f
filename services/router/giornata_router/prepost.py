"""Asking prepost, again where that can help; an error that asking again cannot mend is raised at once.

While prepost is absent or full, an accepted job waits, as long as its budget lasts. After silence, a lost question or
an unexpected error prepost is asked a few times more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from pydantic import BaseModel
from tenacity import AsyncRetrying, RetryCallState

from giornata import retries
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import Fleet, Heard
from giornata.seeing.spans import span
from giornata.seeing.told import Kind
from giornata.wire import subjects
from giornata.wire.cells import in_cell
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
from giornata.wire.workers import ServiceName, ServiceState
from giornata_router.config import RouterConfig

R = TypeVar("R", bound=BaseModel)


class Questions:
    """The open questions to prepost. What no living instance says to have is lost, with its instance or its message.

    `connected` says whether telemetry could be heard now. `listened_s` is the clock in which silence is counted, and
    that :meth:`observe` and :meth:`look` are told (:class:`giornata.fleet.ListeningClock`).
    """

    def __init__(
        self,
        fleet: Fleet,
        connected: Callable[[], bool] = lambda: True,
        listened_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._connected, self._listened_s = fleet, connected, listened_s
        self._heard = Heard[asyncio.Timeout]()
        """When a question was asked, or an instance last said to have it."""
        self._names: dict[asyncio.Timeout, str] = {}

    @asynccontextmanager
    async def asked(self, name: str) -> AsyncIterator[None]:
        """Ask and wait for the answer inside.

        Raises:
            DeadlineExceeded: no instance has the question, so that no answer will come.
        """
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._heard.hear(scope, self._listened_s())
                self._names[scope] = name
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineExceeded("The question, or its answer, was lost.", received=name) from error
        finally:
            self._heard.forget(scope)
            self._names.pop(scope, None)

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry: the questions that an instance has."""
        for scope, name in self._names.items():
            if name in (state.answering or ()):
                self._heard.hear(scope, now)

    def look(self, now: float) -> None:
        """End the waiting for answers that will not come.

        Without a connection no instance is heard, and an instance of an older version does not tell its questions.
        """
        prepost = (state for state in self._fleet.all() if state.service is ServiceName.PREPOST)
        if not self._connected() or any(state.answering is None for state in prepost):
            self._heard.listen(now)
        for scope in self._heard.silent(now):
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


class PrepostClient:
    """Each question raises its own errors, and DeadlineExceeded where it stays unanswered."""

    def __init__(self, bus: Bus, questions: Questions, config: RouterConfig) -> None:
        self._bus, self._questions, self._config = bus, questions, config

    async def inspect(self, job: Job, deadline: Deadline) -> Inspection:
        """Decode and measure the job's pictures."""
        make = partial(InspectRequest, job=job)
        subject = self._subject("inspect", job.model)
        return await self._ask(subject, make, Inspection, self._config.inspect_s, deadline)

    async def encode(self, job: Job, inspection: Inspection, deadline: Deadline) -> Encoding:
        """Make the conditioning of all rows."""
        make = partial(EncodeRequest, job=job, inspection=inspection)
        subject = self._subject("encode", job.model)
        return await self._ask(subject, make, Encoding, self._config.encode_s, deadline)

    async def finish(
        self,
        job: Job,
        inspection: Inspection,
        index: int,
        latents: tuple[BlobRef, ...],
        deadline: Deadline,
    ) -> FinishReply:
        """Decode and paste one picture: of its row's latents, or of those of all its regions."""
        first, *others = latents
        make = partial(
            FinishRequest, job=job, inspection=inspection, index=index, latents=first, others=tuple(others)
        )
        subject = self._subject("finish", job.model)
        return await self._ask(subject, make, FinishReply, self._config.finish_s, deadline)

    async def template(self, template: TemplateRecord, deadline: Deadline) -> TemplateInputs:
        """Decode and encode a template's picture, from which its run begins."""
        make = partial(TemplateRequest, template=template)
        subject = self._subject("template", template.model)
        return await self._ask(subject, make, TemplateInputs, self._config.encode_s, deadline)

    def _subject(self, verb: str, model: str) -> str:
        return in_cell(subjects.prepost(verb, model), self._config.cell)

    async def _ask(
        self, subject: str, make: Callable[..., Question], reply: type[R], limit_s: float, deadline: Deadline
    ) -> R:
        request = make(remaining_ms=deadline.at_most(limit_s).remaining_ms())

        tries: list[str] = []
        name = f"ask {subjects.kind_of(subject)}"

        async def ask_once() -> R:
            with span(name, Kind.ASKS, links=tries[-1:], tries=len(tries) + 1) as asking:
                tries.append(asking.traceparent or "")
                async with self._questions.asked(question(request)):
                    return await self._bus.call(subject, request, reply, deadline.at_most(limit_s))

        def policy() -> AsyncRetrying:
            return retries.elsewhere(_worth_another_try, _after_faults(self._config.stage_tries))

        return await retries.persistently(policy, ask_once)


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
