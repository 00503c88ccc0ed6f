"""What one worker has, listed by telemetry or not listed yet. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

from giornata.residency.host_tiers import HostTiers
from giornata.scheduling.adapters import LoraLoadTimes, by_tier
from giornata.scheduling.backlog import FinishEstimator, RowLoad, WorkerLoad
from giornata.scheduling.degrees.pool import PoolRow
from giornata.scheduling.demand import UNIT, JobDemand, StepTimeModel
from giornata.scheduling.estimates import UNTOLD
from giornata.scheduling.incoming import PendingAdapterLoads
from giornata.scheduling.pool_outlook import PoolFinishEstimator
from giornata.scheduling.pool_rows import PoolRows, pool_of
from giornata.scheduling.progress import computed_of, left_of, reuses, shape_of
from giornata.wire.workers import RowProgress, ServiceName, ServiceState, Tier, WorkerState

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
            loras = by_tier(shown.adapters_resident)
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
        """How many rows it has, listed or not yet."""
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
        """Whether the host tier of its machine has one of these LoRAs."""
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

        `slack` is that of :meth:`giornata.scheduling.backlog.WorkerLoad.worth`.
        """
        if pace is not self.pace:
            self.pace = pace
            self._loads.clear()
            self.rates = {}
            self.pool = pool_of(pace, self.shown)
        entries = [
            (attempt, rows, demanded.get(attempt), sum(map(computed_of, rows)))
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
        computed = computed_of(row)
        steps, every = left_of(row), row.renewed_every
        spread = steps if every and not row.begun else 0  # over which steps in full are spread
        key = (
            *(row.prefix_tokens, row.text_tokens, row.padding_tokens, row.tokens + row.companion_tokens),
            *(computed, row.sequences, row.begun, every, spread, row.low_rank, row.control),
        )
        alike = self.rates.get(key)
        if alike is not None:
            return RowLoad(steps, alike.step_ms, alike.first_ms, alike.tokens, alike.first_tokens)
        load = shape_of(row).load(self.pace, reuses=reuses(row), renewed_every=every)
        if len(self.rates) >= REMEMBERED:
            self.rates.clear()
        self.rates[key] = load
        return load
