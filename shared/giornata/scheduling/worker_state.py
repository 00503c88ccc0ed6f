"""The state of each worker, and which workers take rows of a model now. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from typing import Final

from giornata.residency.use_based import HostTiers
from giornata.scheduling.adapters import LoraLoadTimes, PendingAdapterLoads, fastest_tiers
from giornata.scheduling.cost_models import UNTOLD
from giornata.scheduling.degrees.pool import MOST_DEVICES, PoolRow
from giornata.scheduling.demand import (
    UNIT,
    FinishEstimator,
    JobDemand,
    RowLoad,
    StepTimeModel,
    WorkerLoad,
    computed_tokens,
    is_reusing,
    remaining_steps,
    shape_of,
)
from giornata.scheduling.pool_rows import PoolFinishEstimator, PoolRows
from giornata.wire.workers import RankPhase, RowProgress, ServiceName, ServiceState, Tier, WorkerState

Attempt = tuple[str, int]
"""Job and attempt."""
Served = tuple[str, str]
"""Name and digest of a model."""
REMEMBERED: Final = 64
"""How many ended attempts, and how many costs of rows, are kept of each worker."""


@dataclass(frozen=True)
class AssignedAttempt:
    """Rows of one attempt, counted as on one worker."""

    key: Attempt
    worker: str
    demand: JobDemand


@dataclass(frozen=True)
class WorkerTotals:
    """Everything a worker has, summed up."""

    backlog: WorkerLoad
    owners: tuple[str, ...]
    """The job of each of the backlog's rows."""
    tokens: int
    """Image tokens that the rows compute."""
    work_ms: float
    """Sum over all rows, without the base of steps."""
    places: int
    """Most rows that it gets; more would make it hardly faster."""
    pool: tuple[PoolRow, ...] | None = None
    """The same rows as those of a pool; None of a worker with one device."""
    devices: int = 1
    """That compute."""

    @property
    def rows(self) -> int:
        """Their number."""
        return len(self.owners)

    @cached_property
    def outlook(self) -> FinishEstimator | PoolFinishEstimator:
        """The backlog, prepared to be asked; made for the few workers of many that are asked."""
        if self.pool is None:
            return FinishEstimator(self.backlog)
        return PoolFinishEstimator(self.devices, self.pool, self.backlog)


@dataclass(slots=True)
class WorkerOccupancy:
    """One worker, as far as choosing it depends on it."""

    state: ServiceState
    shown: WorkerState
    pace: StepTimeModel
    incoming: PendingAdapterLoads
    """Adapters that are on their way to its device."""
    controlnets: frozenset[str] = frozenset()
    """Digests of the ControlNets that its process computes."""
    fetch_ms: float = 0.0
    """Time of reading one of its templates from disk."""
    arrivals: LoraLoadTimes = UNTOLD
    """How long LoRAs take to come here."""
    listed: dict[Attempt, list[RowProgress]] = field(default_factory=dict)
    """Rows by the latest telemetry."""
    unseen: dict[Attempt, JobDemand] = field(default_factory=dict)
    """What is assigned and not listed yet."""
    ended: dict[Attempt, None] = field(default_factory=dict)
    """The latest attempts that were reported: a message may list them still, or again if it is late."""
    places: dict[str, Tier] = field(default_factory=dict)
    """Templates that it has; one that is in both tiers is in memory. The same object until they change."""
    loras: dict[str, Tier] = field(default_factory=dict)
    """The fastest tier of each LoRA that it has, by digest. The same object until they change."""
    on_device: frozenset[str] = frozenset()
    """Digests of the LoRAs that are on the device."""
    host_tiers: HostTiers | None = None
    """What the host tiers of LoRAs hold."""
    on_disk: int = 0
    """Templates on disk, wherever else they are."""
    stalled: bool = False
    totals: WorkerTotals | None = None
    """None once the worker's rows have changed."""
    _loads: dict[Attempt, tuple[RowLoad, ...]] = field(default_factory=dict)
    """Costs of what is listed and unseen, at the present pace; a new message empties it."""
    rates: dict[tuple[float, ...], RowLoad] = field(default_factory=dict)
    """Costs of rows like the listed ones, at the present pace: most are listed many times, with fewer steps left."""
    pool: PoolRows | None = None
    """What rows are in steps of several devices, at the present pace; None of a worker with one."""

    @classmethod
    def of(
        cls, state: ServiceState, shown: WorkerState, pace: StepTimeModel, before: WorkerOccupancy | None
    ) -> WorkerOccupancy:
        """A worker by its latest telemetry, and by what was known `before`."""
        incoming = PendingAdapterLoads(shown.adapter_lanes) if before is None else before.incoming
        made = cls(state, shown, pace, incoming)
        for row in shown.running + shown.waiting:
            made.listed.setdefault((row.job_id, row.attempt), []).append(row)
        if before is not None:
            made.ended, made.unseen = before.ended, before.unseen
            if before.pace is pace:
                made.rates, made.pool = before.rates, before.pool
            made.places, made.on_disk = before.places, before.on_disk
            made.loras, made.on_device = before.loras, before.on_device
        made.pool = pool_of(pace, shown, made.pool)
        if shown.adapters_resident is not None:
            loras = fastest_tiers(shown.adapters_resident)
            if loras != made.loras:
                made.loras = loras
                made.on_device = frozenset(shown.adapters_resident.get(Tier.DEVICE, ()))
        if shown.resident is not None:
            tiers = (Tier.DISK, Tier.MEMORY)
            places = {key: tier for tier in tiers for key in shown.resident.get(tier, ())}
            if places != made.places:
                made.places = places
            made.on_disk = len(shown.resident.get(Tier.DISK, ()))
        return made

    @property
    def name(self) -> str:
        """Its instance."""
        return self.state.instance

    @property
    def served(self) -> list[Served]:
        """Models that it takes rows of now."""
        state = self.state
        able = state.ready and state.active and not state.draining and not self.stalled
        if not able or state.service is not ServiceName.DENOISER:
            return []
        return [(card.name, card.digest) for card in state.models]

    @property
    def disk_bytes(self) -> float:
        """Size of a template on disk, on average over the listed ones."""
        told = self.shown.templates
        return told.disk_bytes / self.on_disk if told is not None and self.on_disk else 0.0

    @property
    def rows(self) -> int:
        """Return how many rows it has, listed or not yet."""
        listed = sum(len(rows) for attempt, rows in self.listed.items() if attempt not in self.ended)
        return listed + sum(demand.rows for demand in self.unseen.values())

    def give(self, attempt: Attempt, demand: JobDemand, now: float) -> None:
        """Count `demand` from `now` on; its adapters are on their way."""
        self.bring(demand, now)
        self.ended.pop(attempt, None)
        if attempt not in self.listed:
            self.unseen[attempt] = demand
        self.totals = None

    def take(self, attempt: Attempt) -> None:
        """Stop counting an attempt, though it may be listed still."""
        self.unseen.pop(attempt, None)
        self._loads.pop(attempt, None)
        self.ended[attempt] = None
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]
        self.totals = None

    def tier_of(self, digest: str) -> Tier | None:
        """The fastest tier that has a LoRA; the host tier of its machine counts as its disk."""
        tier = self.loras.get(digest)
        if tier is None and self.host_tiers is not None and self.host_tiers.has(self.shown.lora_host, digest):
            return Tier.DISK
        return tier

    def host_has_any(self, digests: Iterable[str]) -> bool:
        """Return whether the host tier of its machine has one of these LoRAs."""
        tiers, name = self.host_tiers, self.shown.lora_host
        return tiers is not None and name is not None and any(tiers.has(name, digest) for digest in digests)

    def bring(self, demand: JobDemand, now: float) -> None:
        """The worker is told to load what `demand` needs."""
        if demand.adapters:
            held = {lora.digest: tier for lora in demand.adapters if (tier := self.tier_of(lora.digest))}
            self.incoming.bring(demand.adapters, held, self.arrivals, now)

    def forget(self, attempt: Attempt, totals: WorkerTotals | None, incoming: PendingAdapterLoads) -> None:
        """Take `attempt` back as if it had never been given, with the `totals` and the loads of before."""
        del self.unseen[attempt]
        self._loads.pop(attempt, None)
        self.totals, self.incoming = totals, incoming

    def sum_up(
        self, pace: StepTimeModel, demanded: Mapping[Attempt, JobDemand], slack: float = 0.0
    ) -> WorkerTotals:
        """Sum up everything it has at its present pace; `demanded` are attempts that it has no inputs of yet.

        `slack` is that of :meth:`giornata.scheduling.demand.WorkerLoad.worth`.
        """
        if pace is not self.pace:
            self.pace = pace
            self._loads.clear()
            self.rates = {}
            self.pool = pool_of(pace, self.shown)
        entries = [
            (attempt, rows, demanded.get(attempt), sum(map(computed_tokens, rows)))
            for attempt, rows in self.listed.items()
            if attempt not in self.ended
        ]
        entries += [(attempt, [], demand, demand.computed) for attempt, demand in self.unseen.items()]
        loads, owners, pool, tokens = list[RowLoad](), list[str](), list[PoolRow](), 0
        for attempt, rows, demand, own_tokens in entries:
            costs = self._costs(attempt, rows, demand)
            loads += costs
            owners += [attempt[0]] * len(costs)
            tokens += own_tokens
            if self.pool is not None:
                pool += self.pool.of(rows, demand, self.places, len(pool))
        empty = WorkerLoad(self.shown.capacity_rows, pace.base_ms, tokens=self.shown.capacity_tokens)
        work_ms = sum(load.work_ms for load in loads)
        backlog = empty.running_what_fits(loads)
        made = WorkerTotals(backlog, tuple(owners), tokens, work_ms, self._worth(backlog, slack))
        if self.pool is not None:
            devices = self.pool.devices
            made = replace(made, work_ms=work_ms / devices, pool=tuple(pool), devices=devices)
        self.totals = made
        return made

    def limit(self, slack: float) -> None:
        """Let it have as many rows as are worth it by another `slack`."""
        if self.totals is not None:
            self.totals = replace(self.totals, places=self._worth(self.totals.backlog, slack))

    def _worth(self, backlog: WorkerLoad, slack: float) -> int:
        known = self.pool is None and self.pace.costs is not UNIT
        return backlog.worth(slack) if known else backlog.places

    def _costs(
        self, attempt: Attempt, rows: Iterable[RowProgress], demand: JobDemand | None
    ) -> tuple[RowLoad, ...]:
        """Costs of an attempt by its demand, or where there is none by its rows."""
        known = self._loads.get(attempt)
        if known is None:
            if demand is not None:
                known = demand.loads(self.pace, reuses=demand.template in self.places)
            else:
                known = tuple(map(self._load, rows))
            self._loads[attempt] = known
        return known

    def _load(self, row: RowProgress) -> RowLoad:
        computed = computed_tokens(row)
        steps, every = remaining_steps(row), row.renewed_every
        spread = steps if every and not row.begun else 0  # over which steps in full are spread
        key = (
            *(row.prefix_tokens, row.text_tokens, row.padding_tokens, row.tokens + row.companion_tokens),
            *(computed, row.sequences, row.begun, every, spread, row.low_rank, row.control),
        )
        alike = self.rates.get(key)
        if alike is not None:
            return RowLoad(steps, alike.step_ms, alike.first_ms, alike.tokens, alike.first_tokens)
        load = shape_of(row).load(self.pace, reuses=is_reusing(row), renewed_every=every)
        if len(self.rates) >= REMEMBERED:
            self.rates.clear()
        self.rates[key] = load
        return load


# A decision looks at a few of them, so that it costs about the same for eight workers and for a thousand.


FEWER: Final = 4
"""One in so many of the workers that are looked at has the adapters: each more that has them has more to compute."""


class _SortedNames:
    """Names ordered by a number, least first, and equal ones by name."""

    def __init__(self) -> None:
        self._places: list[tuple[float, str]] = []
        self._values: dict[str, float] = {}

    def put(self, name: str, value: float) -> None:
        """Move `name` to the place of `value`."""
        if self._values.get(name) != value:
            self.drop(name)
            self._values[name] = value
            insort(self._places, (value, name))

    def drop(self, name: str) -> None:
        """Take `name` out, if it is there."""
        value = self._values.pop(name, None)
        if value is not None:
            del self._places[bisect_left(self._places, (value, name))]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return (name for _, name in self._places)

    def every(self, step: int) -> list[str]:
        """Every `step`-th name, from the middle of the first `step`."""
        return [name for _, name in self._places[(step - 1) // 2 :: step]]

    def of(self, name: str) -> tuple[float, str]:
        """The place of `name`, to compare with others."""
        return self._values[name], name


class _HolderIndex:
    """An index of which workers have what."""

    def __init__(self) -> None:
        self._names: dict[str, set[str]] = {}

    def of(self, key: str) -> Collection[str]:
        """The workers that have this."""
        return self._names.get(key, frozenset())

    def of_most(self, keys: Iterable[str]) -> Collection[str]:
        """The workers that have the first of these that one has, and as many of the following as one has with them."""
        found: Collection[str] = frozenset()
        for key in keys:
            having = self.of(key)
            found = frozenset(having).intersection(found) or found or having
        return found

    def change(self, name: str, before: Collection[str], now: Collection[str]) -> None:
        """The worker of this name had what was `before`, and has what is `now`."""
        for key in before:
            if key not in now:
                holders = self._names[key]
                holders.discard(name)
                if not holders:
                    del self._names[key]
        for key in now:
            if key not in before:
                self._names.setdefault(key, set()).add(name)


class WorkerIndex:
    """Keeps workers in order while they change; `sum_up` sums up a worker that has changed."""

    def __init__(self, sum_up: Callable[[WorkerOccupancy], WorkerTotals]) -> None:
        self._sum_up = sum_up
        self._members: dict[str, WorkerOccupancy] = {}
        self._changed: dict[str, None] = {}
        """Workers that have to be summed up, in the order in which they changed."""
        self._work, self._crowding = _SortedNames(), _SortedNames()
        self._templates, self._adapters, self._on_device = _HolderIndex(), _HolderIndex(), _HolderIndex()
        """Who has which templates, which adapters in any tier, and which adapters on the device."""

    def __len__(self) -> int:
        return len(self._members)

    def put(self, worker: WorkerOccupancy) -> None:
        """Take in a worker, instead of what was known of it before."""
        before = self._members.get(worker.name)
        self._members[worker.name] = worker
        self._changed[worker.name] = None
        if before is None or before.places is not worker.places:
            self._templates.change(worker.name, before.places if before else (), worker.places)
        if before is None or before.loras is not worker.loras:
            self._adapters.change(worker.name, before.loras if before else (), worker.loras)
            self._on_device.change(worker.name, before.on_device if before else (), worker.on_device)

    def drop(self, name: str) -> None:
        """Take a worker out, if it is there."""
        worker = self._members.pop(name, None)
        if worker is not None:
            self._changed.pop(name, None)
            self._work.drop(name)
            self._crowding.drop(name)
            self._templates.change(name, worker.places, ())
            self._adapters.change(name, worker.loras, ())
            self._on_device.change(name, worker.on_device, ())

    def changed(self, name: str) -> None:
        """The rows of a worker have changed."""
        if name in self._members:
            self._changed[name] = None

    def all(self, excluded: Collection[str] = ()) -> list[WorkerOccupancy]:
        """All workers but the excluded ones, least to compute first."""
        return [self._members[name] for name in self._ordered(excluded)]

    def sample(self, count: int) -> list[tuple[WorkerOccupancy, float]]:
        """About `count` workers evenly spread over the order, each with how many workers it stands for.

        The order is that of the last time it was needed; only these workers are summed up.
        """
        if len(self._work) != len(self._members):
            self._settle()
        names = self._work.every(max(1, len(self._members) // count))
        for name in names:
            if name in self._changed:
                self._place(name)
        return [(self._members[name], len(self._members) / len(names)) for name in names]

    def least(self, count: int, excluded: Collection[str] = ()) -> list[WorkerOccupancy]:
        """The `count` workers with least to compute."""
        return [self._members[name] for name in islice(self._ordered(excluded), count)]

    def fitting(self, demand: JobDemand, count: int, excluded: Collection[str] = ()) -> list[WorkerOccupancy]:
        """The `count` workers with least to compute, and those with least to compute that have what `demand` needs.

        So many have its template, and one in :data:`FEWER` its adapters on the device, as many in any tier.
        """
        found = dict.fromkeys(islice(self._ordered(excluded), count))
        if demand.template is not None:
            found |= dict.fromkeys(self._least_of(self._templates.of(demand.template), count, excluded))
        if demand.adapters:
            largest = sorted(demand.adapters, key=itemgetter(1), reverse=True)
            digests, few = [adapter.digest for adapter in largest], max(1, count // FEWER)
            for holders in (self._on_device, self._adapters):
                found |= dict.fromkeys(self._least_of(holders.of_most(digests), few, excluded))
        return [self._members[name] for name in found]

    def _least_of(self, having: Collection[str], count: int, excluded: Collection[str]) -> Iterable[str]:
        """The `count` workers with least to compute of those that have something."""
        if len(having) > count * count:  # so many that they are met soon
            return islice((name for name in self._ordered(excluded) if name in having), count)
        self._settle()
        return sorted((name for name in having if name not in excluded), key=self._work.of)[:count]

    def has_room(self, demand: JobDemand, excluded: Collection[str] = ()) -> bool:
        """Return whether a worker could take `demand` now; workers that have changed are summed up until one can."""
        for name in self._crowding:
            if name not in excluded and name not in self._changed:
                if self._fits(name, demand):
                    return True
                break  # the others have less room
        for name in list(self._changed):
            self._place(name)
            if name not in excluded and self._fits(name, demand):
                return True
        return False

    def _fits(self, name: str, demand: JobDemand) -> bool:
        worker = self._members[name]
        totals = worker.totals or self._sum_up(worker)
        return demand.fits(totals.rows, totals.places)

    def _ordered(self, excluded: Collection[str]) -> Iterator[str]:
        self._settle()
        return (name for name in self._work if name not in excluded)

    def _settle(self) -> None:
        for name in list(self._changed):
            self._place(name)

    def _place(self, name: str) -> None:
        """Move a worker that has changed to its place in the orders."""
        self._changed.pop(name, None)
        worker = self._members[name]
        totals = worker.totals or self._sum_up(worker)
        self._work.put(name, totals.work_ms)
        self._crowding.put(name, totals.rows - totals.places if totals.rows else -math.inf)


def pool_of(pace: StepTimeModel, shown: WorkerState, before: PoolRows | None = None) -> PoolRows | None:
    """Return what makes the rows of a worker; None where one device computes. `before` was made for the same pace."""
    devices = min(MOST_DEVICES, sum(rank.phase is RankPhase.READY for rank in shown.ranks))
    if devices <= 1:
        return None
    return before if before is not None and before.devices == devices else PoolRows(pace, devices)
