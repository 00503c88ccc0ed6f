"""What one worker has: listed by telemetry and not reported, or assigned and not listed yet. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from giornata.scheduling.backlog import Backlog, Outlook, RowLoad
from giornata.scheduling.demand import Demand, Pace, RowShape
from giornata.scheduling.estimates import UNKNOWN
from giornata.wire.workers import RowProgress, ServiceName, ServiceState, Tier, WorkerState

Attempt = tuple[str, int]
"""Job and attempt."""
Served = tuple[str, str]
"""Name and digest of a model."""
REMEMBERED: Final = 64
"""Attempts that have ended, and what rows cost, of each worker."""


class Totals(NamedTuple):
    """All of it, summed up."""

    outlook: Outlook
    owners: tuple[str, ...]
    """Jobs of the outlook's rows."""
    tokens: int
    """Of the rows' pictures."""
    work_ms: float
    """Of all rows, as if steps cost nothing by themselves."""

    @property
    def rows(self) -> int:
        """Their number."""
        return len(self.owners)


@dataclass(slots=True)
class Occupancy:
    """One worker, as far as choosing it depends on it."""

    state: ServiceState
    shown: WorkerState
    pace: Pace
    fetch_ms: float = 0.0
    """Of reading one of its templates from disk."""
    listed: dict[Attempt, list[RowProgress]] = field(default_factory=dict)
    """Of the latest telemetry."""
    unseen: dict[Attempt, Demand] = field(default_factory=dict)
    """Assigned, and not listed yet."""
    ended: dict[Attempt, None] = field(default_factory=dict)
    """The latest ones that were reported: a message may list them still, or again if it is late."""
    places: dict[str, Tier] = field(default_factory=dict)
    """Templates that it has."""
    stalled: bool = False
    totals: Totals | None = None
    """None once what it has changed."""
    _loads: dict[Attempt, tuple[RowLoad, ...]] = field(default_factory=dict)
    """Of what is listed and unseen, with the present pace; a new message begins anew."""
    rates: dict[tuple[int, int, int, int, bool], RowLoad] = field(default_factory=dict)
    """Of rows like those listed, with the present pace: most are listed again and again, with fewer steps left."""

    @classmethod
    def of(cls, state: ServiceState, shown: WorkerState, pace: Pace, before: Occupancy | None) -> Occupancy:
        """As the latest telemetry tells it, and what was known before beside it."""
        made = cls(state, shown, pace)
        for row in shown.running + shown.waiting:
            made.listed.setdefault((row.job_id, row.attempt), []).append(row)
        if before is None:
            made.places = _places(shown)
            return made
        made.ended, made.unseen = before.ended, before.unseen
        if before.pace is pace:
            made.rates = before.rates
        same = shown.resident == before.shown.resident
        made.places = before.places if same else _places(shown)
        return made

    @property
    def name(self) -> str:
        """Of its instance."""
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
    def known(self) -> bool:
        """Whether it has told what its steps cost."""
        return self.pace is not UNKNOWN

    @property
    def disk_bytes(self) -> float:
        """Of a template on disk, on average over those that are listed."""
        count = len(self.shown.resident.get(Tier.DISK, ()))
        return self.shown.templates.disk_bytes / count if self.shown.templates is not None and count else 0.0

    def give(self, attempt: Attempt, demand: Demand) -> None:
        """Count `demand` from now on."""
        self.ended.pop(attempt, None)
        if attempt not in self.listed:
            self.unseen[attempt] = demand
        self.totals = None

    def take(self, attempt: Attempt) -> None:
        """Count it no more, though it may be listed still."""
        self.unseen.pop(attempt, None)
        self._loads.pop(attempt, None)
        self.ended[attempt] = None
        if len(self.ended) > REMEMBERED:
            del self.ended[next(iter(self.ended))]
        self.totals = None

    def forget(self, attempt: Attempt, totals: Totals | None) -> None:
        """Take `attempt` back as if it had never been given, with the `totals` of before."""
        del self.unseen[attempt]
        self._loads.pop(attempt, None)
        self.totals = totals

    def sum_up(self, pace: Pace, demanded: Mapping[Attempt, Demand]) -> Totals:
        """All that it has.

        Args:
            pace: at which it computes now.
            demanded: what was asked for where the worker knows no more of it than that.
        """
        if pace is not self.pace:
            self.pace = pace
            self._loads.clear()
            self.rates = {}
        loads: list[RowLoad] = []
        owners: list[str] = []
        tokens = 0
        for attempt, rows in self.listed.items():
            if attempt in self.ended:
                continue
            known = self._loads.get(attempt)
            if known is None:
                demand = demanded.get(attempt)
                known = tuple(map(self._load, rows)) if demand is None else self._of(demand)
                self._loads[attempt] = known
            loads += known
            owners += [attempt[0]] * len(known)
            tokens += sum(row.tokens for row in rows)
        for attempt, demand in self.unseen.items():
            known = self._loads.get(attempt)
            if known is None:
                known = self._loads[attempt] = self._of(demand)
            loads += known
            owners += [attempt[0]] * len(known)
            tokens += demand.tokens
        backlog = Backlog(self.shown.capacity_rows, pace.base_ms, tokens=self.shown.capacity_tokens)
        work_ms = sum(load.work_ms for load in loads)
        self.totals = Totals(Outlook(backlog.running_what_fits(loads)), tuple(owners), tokens, work_ms)
        return self.totals

    def _load(self, row: RowProgress) -> RowLoad:
        computed = row.tokens if row.computed_tokens is None else row.computed_tokens
        key = row.text_tokens, row.tokens, computed, row.sequences, row.begun
        steps, alike = max(1, row.steps - row.step), self.rates.get(key)
        if alike is not None:
            return RowLoad(steps, alike.step_ms, alike.first_ms, alike.tokens, alike.first_tokens)
        shape = RowShape(row.text_tokens, row.tokens, computed, steps, row.sequences, row.begun)
        load = shape.load(self.pace, reuses=computed < row.tokens)
        if len(self.rates) >= REMEMBERED:
            self.rates.clear()
        self.rates[key] = load
        return load

    def _of(self, demand: Demand) -> tuple[RowLoad, ...]:
        return demand.loads(self.pace, reuses=demand.template in self.places)


def _places(shown: WorkerState) -> dict[str, Tier]:
    """A template that is in both tiers is in memory."""
    return {key: tier for tier in (Tier.DISK, Tier.MEMORY) for key in shown.resident.get(tier, ())}
