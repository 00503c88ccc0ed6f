"""Asking prepost: each stage of a job at an instance with room, and elsewhere, as often as the job's budget allows.

What an instance's silence, absence or failure ends is one question, never a job; an error that asking again cannot mend
is raised at once. While no instance is alive, or none has room, a stage waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import structlog
from pydantic import BaseModel
from tenacity import AsyncRetrying

from giornata import retries
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.fleet import Fleet, LastSeenTimes
from giornata.observability.tracing import TraceSpanKind, span
from giornata.scheduling.queue import Key, SchedulingParams
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError
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
from giornata_router.rules.stages import PrepostStage, StageCost, StagePlacement, Verb

R = TypeVar("R", bound=BaseModel)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _StageQuestion(Generic[R]):
    """A stage as it is asked for, again and again with the time that is left."""

    verb: Verb
    owner: Job | TemplateRecord
    make: Callable[..., Question]
    reply: type[R]
    limit_s: float
    """Time that the first instance has for it."""
    amount: float = 1.0
    """Its size, in the unit of its verb."""


class PrepostRequests:
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
        self._heard = LastSeenTimes[asyncio.Timeout]()
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
    """Each question raises its own errors, and DeadlineExceeded where it stays unanswered until its deadline."""

    def __init__(
        self,
        bus: Bus,
        questions: PrepostRequests,
        placement: StagePlacement,
        fleet: Fleet,
        config: RouterConfig,
    ) -> None:
        self._bus, self._questions, self._config = bus, questions, config
        self._placement, self._fleet = placement, fleet
        self._waiting: dict[Key, asyncio.Future[str]] = {}
        self._wake: asyncio.TimerHandle | None = None

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in telemetry, after the fleet has; `now` is when this process heard it, by its listening clock."""
        self._questions.observe(state, now)
        self._placement.observe(state)
        if state.service is ServiceName.PREPOST:
            self._place()

    def look(self, now: float) -> None:
        """Give up questions that were lost, and ask others in place of instances that are gone."""
        self._questions.look(now)
        self._place()

    @contextmanager
    def carrying(self, job: Job) -> Iterator[None]:
        """Inside, a job goes on: stages of it may come."""
        self._placement.begin_job(job.tenant)
        try:
            yield
        finally:
            self._placement.end_job(job.tenant, time.monotonic())
            self._place()

    async def inspect(self, job: Job, deadline: Deadline) -> Inspection:
        """Decode and measure the job's pictures."""
        make = partial(InspectRequest, job=job)
        stage = _StageQuestion("inspect", job, make, Inspection, self._config.stage_s)
        found = await self._ask(stage, deadline)
        self._learn(stage, StageCost(images_ms=found.compute_ms))
        return found

    async def encode(self, job: Job, inspection: Inspection, deadline: Deadline) -> Encoding:
        """Make the conditioning of all rows."""
        make = partial(EncodeRequest, job=job, inspection=inspection)
        stage = _StageQuestion("encode", job, make, Encoding, self._config.stage_s, job.row_count)
        made = await self._ask(stage, deadline)
        self._learn(stage, StageCost(model_ms=made.compute_ms))
        return made

    async def finish(
        self,
        job: Job,
        inspection: Inspection,
        index: int,
        latents: tuple[BlobRef, ...],
        deadline: Deadline,
    ) -> FinishReply:
        """Decode and paste one picture: of its row's latents, or of those of all its regions."""
        make = partial(
            FinishRequest, job=job, inspection=inspection, index=index, latents=latents[0], others=latents[1:]
        )
        pixels = max(inspection.width * inspection.height, inspection.output_width * inspection.output_height)
        stage = _StageQuestion("finish", job, make, FinishReply, self._config.stage_s, pixels / 1e6)
        made = await self._ask(stage, deadline)
        self._learn(stage, StageCost(made.paste_ms, made.decode_ms))
        return made

    async def template(self, template: TemplateRecord, deadline: Deadline) -> TemplateInputs:
        """Decode and encode a template's picture, from which its run begins."""
        make = partial(TemplateRequest, template=template)
        stage = _StageQuestion("template", template, make, TemplateInputs, self._config.stage_s)
        return await self._ask(stage, deadline)

    def _learn(self, stage: _StageQuestion[R], cost: StageCost) -> None:
        owner = stage.owner
        self._placement.costs.observe(stage.verb, owner.model_digest, owner.tenant, stage.amount, cost)

    async def _ask(self, stage: _StageQuestion[R], deadline: Deadline) -> R:
        """The answer of any instance; one that fails or takes too long is passed over while there is another."""
        tries, failed = list[str](), list[str]()

        async def ask_once() -> R:
            async with self._at_instance(stage, deadline, frozenset(failed)) as instance:
                name = f"ask prepost {stage.verb}"
                with span(name, TraceSpanKind.ASKS, links=tries[-1:], tries=len(tries) + 1) as asking:
                    tries.append(asking.traceparent or "")
                    asking.note(worker=instance)
                    # a stage that needs longer than its limit would never end: each failure doubles it
                    limit = deadline.at_most(stage.limit_s * 2.0 ** min(len(failed), 16))
                    try:
                        return await self._ask_at(instance, stage, limit)
                    except GiornataError as error:
                        failed.append(instance)
                        if _worth_another_try(error):
                            log.warning("stage_failed", stage=stage.verb, instance=instance, error=str(error))
                        raise

        def policy() -> AsyncRetrying:
            return retries.elsewhere(_worth_another_try, lambda _: not deadline.remaining_s())

        return await retries.retry(policy, ask_once)

    async def _ask_at(self, instance: str, stage: _StageQuestion[R], limit: Deadline) -> R:
        request, state = stage.make(remaining_ms=limit.remaining_ms()), self._fleet.get(instance)
        subject = subjects.prepost_at(instance, stage.verb)
        if state is not None and state.prepost is None:  # an older version: all of the model share a queue
            subject = subjects.prepost(stage.verb, stage.owner.model)
        async with self._questions.asked(question(request)):
            return await self._bus.call(subject, request, stage.reply, limit)

    @asynccontextmanager
    async def _at_instance(
        self, asked: _StageQuestion[R], deadline: Deadline, avoid: frozenset[str]
    ) -> AsyncIterator[str]:
        """Wait for the stage's turn; inside, it takes room of an instance."""
        owner = asked.owner
        cost = self._placement.costs.of(asked.verb, owner.model_digest, owner.tenant, asked.amount)
        stage = PrepostStage(asked.verb, owner.model, owner.model_digest, cost, avoid)
        if isinstance(owner, Job):
            slo_ms, since_s = owner.parameters.slo_ms, deadline.at_s - owner.budget_ms / 1e3
            by_s = None if slo_ms is None else since_s + slo_ms / 1e3
            name, claim = owner.job_id, SchedulingParams(owner.priority, owner.tenant, owner.weight, by_s)
        else:
            name, claim, since_s = owner.template_id, SchedulingParams(tenant=owner.tenant), time.monotonic()
        key = self._placement.join(name, stage, claim, since_s)
        given = self._waiting[key] = asyncio.get_running_loop().create_future()
        self._place()
        try:
            yield await given
        finally:
            del self._waiting[key]
            self._placement.leave(key, time.monotonic())
            self._place()

    def _place(self) -> None:
        """Let stages go whose turn it is, now and when a model's thread should be free."""
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        now = time.monotonic()
        placed, wake_at = self._placement.place(now)
        for key, instance in placed:
            given = self._waiting[key]
            if not given.done():  # a job that was cancelled gives its room back in a moment
                given.set_result(instance)
        if wake_at is not None:
            self._wake = asyncio.get_running_loop().call_later(wake_at - now, self._place)


def _worth_another_try(error: BaseException) -> bool:
    """Return whether an instance failed, and not the input: a stage's own time limit is one's silence, too."""
    return isinstance(error, GiornataError) and (error.retryable or isinstance(error, DeadlineExceeded))
