"""Prepost, as jobs' stages ask it: which instance does which stage when, and again elsewhere where it fails.

Stages wait here, in the fair order of rows (:mod:`giornata.scheduling.queue`), where what they probably cost counts
as work. An instance gets what it can begin now: its own queue knows no tenants. What an instance's silence, absence or
failure ends is one question, never a job; an error that asking again cannot mend is raised at once.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

import structlog
from pydantic import BaseModel
from tenacity import AsyncRetrying

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, retry, retry_elsewhere
from giornata.fleet import Fleet, LastSeenTimes
from giornata.scheduling.adapters import UnitTime
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.queue import AGEING_S, FairQueue, Key, QueuedJob, SchedulingParams
from giornata.scheduling.scheduler import ROW
from giornata.tracing import TraceSpanKind, span
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority
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

Verb = Literal["inspect", "encode", "finish", "template"]

AHEAD_MS: Final = 250.0
"""Work for each server that may lie before a stage at an instance: it hides the way, and delays others no more."""
LONG_MS: Final = 1000.0
"""Work in an image process that others notice to wait for: it cannot be interrupted."""
RECENT_S: Final = 30.0
"""After its last job a tenant may come again: so long a process stays free for its short work."""
ENCODINGS: Final = 2
"""Encodings that an instance has at a time: one computes, and one is on its way."""


class StageCost(NamedTuple):
    """The estimated work of a stage, in milliseconds; 0 of a resource that it does not use."""

    images_ms: float = 0.0
    """In an image process."""
    model_ms: float = 0.0
    """In the model's thread."""

    @property
    def total_ms(self) -> float:
        """Work in all resources, which the fair order counts."""
        return self.images_ms + self.model_ms

    def plus(self, other: StageCost, part: float = 1.0) -> StageCost:
        """This and a part of another."""
        return StageCost(self.images_ms + part * other.images_ms, self.model_ms + part * other.model_ms)


UNKNOWN: Final[dict[Verb, StageCost]] = {
    "inspect": StageCost(images_ms=300.0),
    "encode": StageCost(model_ms=300.0),
    "finish": StageCost(300.0, 300.0),
    "template": StageCost(300.0, 300.0),
}
"""Costs before the first answer. They also tell which resources a stage uses."""


TOOK: Final[dict[Verb, Callable[[Any], StageCost]]] = {
    "inspect": lambda reply: StageCost(images_ms=reply.compute_ms),
    "encode": lambda reply: StageCost(model_ms=reply.compute_ms),
    "finish": lambda reply: StageCost(reply.paste_ms, reply.decode_ms),
}
"""Costs as answers tell them; a template's tells none."""


class StageCosts:
    """Learns what stages cost from answers. A tenant's pictures have a size of their own, unknown beforehand."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Verb, str, str | None], tuple[UnitTime, UnitTime]] = {}
        """By verb, model and tenant; those of None are of all tenants, each stage counted once."""

    def observe(self, verb: Verb, digest: str, tenant: str, amount: float, cost: StageCost) -> None:
        """Take in the cost of a tenant's stage; `amount` is its size, in the unit of its verb."""
        for owner, size in ((tenant, amount), ("", amount), (None, 1.0)):
            times = self._seen.setdefault((verb, digest, owner), (UnitTime(), UnitTime()))
            for known, ms in zip(times, cost, strict=True):
                known.observe(size, ms)

    def of(self, verb: Verb, digest: str, tenant: str | None, amount: float = 1.0) -> StageCost:
        """The estimated cost of a stage; of a tenant that is new, the average over all tenants."""
        uses = UNKNOWN[verb]
        times = self._seen.get((verb, digest, tenant)) or self._seen.get((verb, digest, ""))
        if times is None:
            return uses
        return StageCost(
            *(used and max(1.0, time.ms(amount)) for used, time in zip(uses, times, strict=True))
        )

    def known(self, digest: str, *verbs: Verb) -> StageCost:
        """The cost of these stages of one picture, on average over all tenants; 0 of each without an answer."""
        known = (verb for verb in verbs if (verb, digest, None) in self._seen)
        return reduce(StageCost.plus, (self.of(verb, digest, None) for verb in known), StageCost())


class PrepostStage(NamedTuple):
    """A question to any instance that serves a model."""

    verb: Verb
    model: str
    digest: str
    cost: StageCost
    avoid: frozenset[str] = frozenset()
    """Instances that did not answer it; asked again where no other one serves the model."""


@dataclass
class _InstanceLoad:
    """The stages that one instance has of this router."""

    stages: dict[Key, StageCost] = field(default_factory=dict)
    model_free_s: float = 0.0
    """Estimated time at which its model's thread is done with them."""

    def begin(self, key: Key, cost: StageCost, now: float) -> None:
        self.stages[key] = cost
        self.model_free_s = max(self.model_free_s, now) + cost.model_ms / 1e3

    def end(self, key: Key, now: float) -> None:
        del self.stages[key]
        left_ms = sum(cost.model_ms for cost in self.stages.values())
        self.model_free_s = min(self.model_free_s, now + left_ms / 1e3)

    def has_room(self, cost: StageCost, processes: int, now: float) -> bool:
        """Whether a stage could begin now in `processes`, or may wait there behind short work, which hides its way."""
        if cost.images_ms:
            images = [one.images_ms for one in self.stages.values() if one.images_ms]
            short = len(images) == processes and sum(images) <= AHEAD_MS * processes
            if len(images) >= processes and not short:
                return False
        elif sum(not one.images_ms for one in self.stages.values()) >= ENCODINGS:
            return False
        return not cost.model_ms or self.model_free_s <= now + AHEAD_MS / 1e3

    def busy_ms(self, processes: int, now: float) -> float:
        """Work ahead of another stage."""
        images = sum(cost.images_ms for cost in self.stages.values()) / processes
        return images + max(0.0, self.model_free_s - now) * 1e3


class StagePlacement:
    """Queued and placed stages. Feed it the telemetry that `fleet` has taken in."""

    def __init__(self, fleet: Fleet, *, by_deadline: bool = False, ageing_s: float = AGEING_S) -> None:
        self._fleet = fleet
        self._queue = FairQueue(by_deadline=by_deadline, ageing_s=ageing_s, by_ends=True)
        self._stages: dict[Key, PrepostStage] = {}
        """Queued and placed stages."""
        self._placed: dict[Key, str] = {}
        self._loads = defaultdict[str, _InstanceLoad](_InstanceLoad)
        self._jobs = Counter[str]()
        """Jobs in progress by tenant: more of their stages may come."""
        self._recent: dict[str, float] = {}
        """Tenants whose jobs have all ended, and until when they count as if one went on."""
        self.costs = StageCosts()

    def __contains__(self, job_id: object) -> bool:
        """Return whether stages of a job are queued."""
        return job_id in self._queue

    def observe(self, state: ServiceState) -> None:
        """Take in telemetry of an instance, which is known from now on."""
        if state.service is ServiceName.PREPOST:
            self._loads[state.instance] = self._loads[state.instance]

    def begin_job(self, tenant: str) -> None:
        """A job has begun: while it goes on, other tenants' long work leaves a process free for its short stages."""
        self._jobs[tenant] += 1

    def end_job(self, tenant: str, now: float) -> None:
        """No stage of a job comes any more; another job may, soon."""
        self._jobs -= Counter((tenant,))
        self._recent[tenant] = now + RECENT_S

    def join(self, job_id: str, stage: PrepostStage, claim: SchedulingParams, since_s: float) -> Key:
        """Queue a stage; its job has waited since `since_s`."""
        work = replace(ROW, steps=max(1, round(stage.cost.total_ms)))
        demand = JobDemand(stage.model, stage.digest, (work,))
        claim = replace(claim, takes_s=stage.cost.total_ms / 1e3)
        key = self._queue.join(job_id, demand, claim, since_s).key
        self._stages[key] = stage
        return key

    def leave(self, key: Key, now: float) -> None:
        """Forget a stage, queued or placed: it was answered, or is asked no more."""
        instance = self._placed.pop(key, None)
        if instance is None:
            self._queue.leave(key)
        else:
            self._loads[instance].end(key, now)
        del self._stages[key]

    def place(self, now: float) -> tuple[list[tuple[Key, str]], float | None]:
        """Give instances with room the stages whose turn it is; and when to ask again though nothing happens."""
        placed: list[tuple[Key, str]] = []
        self._recent = {tenant: until for tenant, until in self._recent.items() if until > now}
        if not len(self._queue):
            return placed, None
        instances = self._ready()
        full: set[tuple[str, bool, bool, int]] = set()
        for entry in self._queue.order(now) if instances else ():
            stage = self._stages[entry.key]
            spare = int(self._leaves_room(stage, entry.claim.tenant))
            kind = stage.digest, bool(stage.cost.images_ms), bool(stage.cost.model_ms), spare
            if kind in full:
                continue
            serving = [
                state
                for state in instances
                if any((card.name, card.digest) == (stage.model, stage.digest) for card in state.models)
            ]
            wanted = [state for state in serving if state.instance not in stage.avoid] or serving
            best = self._best(wanted, stage.cost, now, spare)
            if best is None:
                if wanted is serving or len(wanted) == len(serving):
                    full.add(kind)
                continue
            self._queue.serve(entry.key, entry.rows, now)
            self._placed[entry.key] = best
            self._loads[best].begin(entry.key, stage.cost, now)
            placed.append((entry.key, best))
        frees = (self._loads[state.instance].model_free_s - AHEAD_MS / 1e3 for state in instances)
        times = (at for at in (*frees, *self._recent.values()) if at > now)
        wake_at = min(times, default=None) if len(self._queue) else None
        return placed, wake_at

    def wait_ms(self, digest: str, job: QueuedJob | None = None, jobs: int = 0) -> float:
        """Return how long the stages of one more edit would wait behind those before it; 0 while no instance is known.

        Those of other tenants come before a `job` up to its own tenant's share; without one, all come before it. So do
        `jobs` that have not asked for anything yet.
        """
        serving = [state for state in self._ready() if any(card.digest == digest for card in state.models)]
        if not serving:
            return 0.0
        edit, waiting = self.costs.known(digest, *UNKNOWN), defaultdict[str, StageCost](StageCost)
        before = StageCost(jobs * edit.images_ms, jobs * edit.model_ms)
        for load in (self._loads[state.instance] for state in serving):
            before = reduce(StageCost.plus, load.stages.values(), before)
        for entry in self._queue:
            later = job and entry.claim.priority is Priority.BATCH is not job.priority
            if entry.demand.model_digest == digest and not later:
                waiting[entry.claim.tenant] = waiting[entry.claim.tenant].plus(self._stages[entry.key].cost)
        share_ms = edit.total_ms + (waiting[job.tenant].total_ms if job else math.inf)
        for cost in waiting.values():
            before = before.plus(cost, min(1.0, share_ms / max(1.0, cost.total_ms)))
        return max(before.images_ms / sum(map(processes_of, serving)), before.model_ms / len(serving))

    def _ready(self) -> list[ServiceState]:
        """Live instances that may be asked, by name."""
        known = ((name, self._fleet.get(name)) for name in sorted(self._loads))
        for name in [name for name, state in known if state is None and not self._loads[name].stages]:
            del self._loads[name]
        states = (self._fleet.get(name) for name in sorted(self._loads))
        return [state for state in states if state and state.ready and not state.draining]

    def _leaves_room(self, stage: PrepostStage, tenant: str) -> bool:
        """Whether a stage is long, and jobs of another tenant, whose pictures are quick, go on or may come soon."""
        return stage.cost.images_ms > LONG_MS and any(
            self.costs.of("inspect", stage.digest, other).images_ms <= LONG_MS
            for other in self._jobs.keys() | self._recent.keys()
            if other != tenant
        )

    def _best(self, states: Iterable[ServiceState], cost: StageCost, now: float, spare: int) -> str | None:
        """The instance with room that has least to do; `spare` of its processes stay free where it has several."""
        ways = (
            (load.busy_ms(processes, now), len(load.stages), state.instance)
            for state in states
            if (load := self._loads[state.instance]).has_room(
                cost, max(1, (processes := processes_of(state)) - spare), now
            )
        )
        return min(ways, default=(0.0, 0, None))[2]


def processes_of(state: ServiceState) -> int:
    """Return how many pictures an instance works on at a time."""
    return 1 if state.prepost is None else state.prepost.image_processes


R = TypeVar("R", bound=BaseModel)

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class _StageQuestion(Generic[R]):
    """A stage as it is asked for, again and again with the time that is left."""

    verb: Verb
    owner: Job | TemplateRecord
    make: Callable[..., Question]
    reply: type[R]
    amount: float = 1.0
    """Its size, in the unit of its verb."""


class PrepostRequests:
    """The open questions to prepost. What no living instance says to have is lost, with its instance or its message.

    `connected` says whether telemetry could be heard now. `listened_s` is the clock in which silence is counted, and
    that :meth:`observe` and :meth:`look` are told (:class:`giornata.fleet.ListeningClock`).
    """

    def __init__(
        self, connected: Callable[[], bool] = lambda: True, listened_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._connected, self._listened_s = connected, listened_s
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
        """End the waiting for answers that will not come; without a connection no instance is heard."""
        if not self._connected():
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
        stage_s: float = RouterConfig.stage_s,
    ) -> None:
        self._bus, self._questions, self._placement, self._stage_s = bus, questions, placement, stage_s
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
        return await self._ask(_StageQuestion("inspect", job, make, Inspection), deadline)

    async def encode(self, job: Job, inspection: Inspection, deadline: Deadline) -> Encoding:
        """Make the conditioning of all rows."""
        make = partial(EncodeRequest, job=job, inspection=inspection)
        return await self._ask(_StageQuestion("encode", job, make, Encoding, job.row_count), deadline)

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
        return await self._ask(_StageQuestion("finish", job, make, FinishReply, pixels / 1e6), deadline)

    async def template(self, template: TemplateRecord, deadline: Deadline) -> TemplateInputs:
        """Decode and encode a template's picture, from which its run begins."""
        make = partial(TemplateRequest, template=template)
        return await self._ask(_StageQuestion("template", template, make, TemplateInputs), deadline)

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
                    limit = deadline.at_most(self._stage_s * 2.0 ** min(len(failed), 16))
                    request = stage.make(remaining_ms=limit.remaining_ms())
                    try:
                        async with self._questions.asked(question(request)):
                            subject = subjects.prepost_at(instance, stage.verb)
                            return await self._bus.call(subject, request, stage.reply, limit)
                    except GiornataError as error:
                        failed.append(instance)
                        if _worth_another_try(error):
                            log.warning("stage_failed", stage=stage.verb, instance=instance, error=str(error))
                        raise

        def policy() -> AsyncRetrying:
            return retry_elsewhere(_worth_another_try, lambda _: not deadline.remaining_s())

        reply, owner = await retry(policy, ask_once), stage.owner
        if (took := TOOK.get(stage.verb)) is not None:
            costs = self._placement.costs
            costs.observe(stage.verb, owner.model_digest, owner.tenant, stage.amount, took(reply))
        return reply

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
