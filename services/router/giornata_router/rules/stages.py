"""The placement of jobs' stages on instances of prepost. Pure: time is an argument, in seconds.

Stages wait here, in the fair order of rows (:mod:`giornata.scheduling.queue`), where what they probably cost counts
as work. An instance gets what it can begin now: its own queue knows no tenants.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Final, Literal, NamedTuple

from giornata.fleet import Fleet
from giornata.scheduling.adapters import UnitTime
from giornata.scheduling.demand import JobDemand
from giornata.scheduling.queue import AGEING_S, FairQueue, Key, QueuedJob, SchedulingParams
from giornata.scheduling.scheduler import ROW
from giornata.wire.jobs import Priority
from giornata.wire.workers import ServiceName, ServiceState

Verb = Literal["inspect", "encode", "finish", "template"]

AHEAD_MS: Final = 250.0
"""Work for each server that may lie before a stage at an instance: it hides the way, and delays others no more."""
LONG_MS: Final = 1000.0
"""Work in an image process that others notice to wait for: it cannot be interrupted."""
RECENT_S: Final = 30.0
"""After its last job a tenant may come again: so long a process stays free for its short work."""
ENCODINGS: Final = 2
"""Encodings that an instance has at a time: one computes, and one is on its way."""
OLD_PROCESSES: Final = 2
"""Image processes of an instance whose version does not tell them: the default."""


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


class StageCosts:
    """Learns what stages cost from answers. A tenant's pictures have a size of their own, unknown beforehand."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Verb, str, str | None], tuple[UnitTime, UnitTime]] = {}
        """By verb, model and tenant; those of None are of all tenants, each stage counted once."""

    def observe(self, verb: Verb, digest: str, tenant: str, amount: float, cost: StageCost) -> None:
        """Take in the cost of a tenant's stage; `amount` is its size, in the unit of its verb."""
        for owner, size in ((tenant, amount), ("", amount), (None, 1.0)):
            times = self._seen.setdefault((verb, digest, owner), (UnitTime(), UnitTime()))
            for time, ms in zip(times, cost, strict=True):
                time.observe(size, ms)

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
            serving = [state for state in instances if _serves(state, stage)]
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
    return OLD_PROCESSES if state.prepost is None else state.prepost.image_processes


def _serves(state: ServiceState, stage: PrepostStage) -> bool:
    return any((card.name, card.digest) == (stage.model, stage.digest) for card in state.models)
