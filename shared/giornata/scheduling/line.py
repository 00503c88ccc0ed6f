"""Jobs that wait for a worker, and whose turn is next: fair between tenants, by priority, never starving. Pure.

Tenants take turns by their shares (:mod:`giornata.scheduling.shares`). A tenant's jobs come in the order of their
arrival, but each is deferred by a multiple of its work that no worker has: small jobs pass large ones, since so most
jobs end soonest, but only those that come soon after. Jobs whose rows stay together come before all others of their
tenant. Batch jobs come after interactive ones until they have waited for a while.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import itemgetter
from typing import Final, TypeVar

from giornata.scheduling.demand import Demand
from giornata.scheduling.shares import FairShares
from giornata.scheduling.totals import LineTotals
from giornata.wire.jobs import Priority

AGEING_S: Final = 30.0
"""A batch job that has waited for so long comes as if it were interactive."""
DEFERRED: Final = 5.0
"""A job comes after the jobs of its tenant that arrive within so many times its own work."""
FAVOURED: Final = 8
"""Jobs with a deadline that may come before one that has waited for :data:`AGEING_S`; then it is its turn."""


H = TypeVar("H", bound=Hashable)


class Turn(StrEnum):
    """Which of a tenant's jobs comes first."""

    LEAST_WORK = "least_work"
    """The least by its arrival and :data:`DEFERRED` times its work that no worker has."""
    ARRIVAL = "arrival"
    """The one that arrived first."""


Key = tuple[str, int]
"""A job and a number: rows of one job may join the line several times, where some came back from a lost worker."""
_Rank = tuple[bool, float, float, int]
"""What orders a tenant's jobs: whether it yields to interactive ones, its deadline, its deferred arrival, ticket."""


@dataclass(frozen=True)
class Claim:
    """What decides when a job's turn comes."""

    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    weight: float = 1.0
    """Weight of the tenant, above 0: with twice the weight, twice the share."""
    finish_by_s: float | None = None
    """When its rows should be computed, by the clock of `now`; None for no wish."""
    takes_s: float = 0.0
    """The least time that one of them takes, or all of them where they stay together; 0 where it is not known."""


@dataclass(frozen=True)
class QueuedRows:
    """Rows of a job in the line."""

    key: Key
    rows: tuple[int, ...]
    """Indices of the rows that have no worker yet."""
    demand: Demand
    """What these rows ask for, in the same order."""
    claim: Claim
    since_s: float
    passed: int = 0
    """Rows of later jobs of the same model that were served first, since they needed less room."""
    fetching: str | None = None
    """The worker that was told to read the job's template from disk, since it is the likely one."""

    @property
    def takes_s(self) -> float:
        """The least time that its rows take one after the other."""
        return self.claim.takes_s * len(self.rows)

    @property
    def job_id(self) -> str:
        """The job of the rows."""
        return self.key[0]

    @property
    def model(self) -> tuple[str, str]:
        """Name and digest."""
        return self.demand.model, self.demand.model_digest

    def asked(self, now: float) -> Demand:
        """The demand, with the time that is left."""
        if self.claim.finish_by_s is None:
            return self.demand
        return replace(self.demand, within_ms=(self.claim.finish_by_s - now) * 1e3)

    def without(self, rows: Collection[int]) -> QueuedRows:
        """The rows that are left once `rows` have workers; they take turns as the next job would."""
        left = [place for place, row in enumerate(self.rows) if row not in rows]
        shapes = tuple(self.demand.shapes[place] for place in left)
        demand = replace(self.demand, shapes=shapes, ticket=self.demand.ticket + len(rows))
        return replace(self, rows=tuple(self.rows[place] for place in left), demand=demand)


class Line:
    """Jobs that are prepared, with rows that no worker has taken yet.

    `turn` says which job of a tenant comes first. `by_deadline`, jobs of a class that wish to end by a time come first,
    the earliest first, as long as they can; a job that cannot any more has no claim and takes its turn. Jobs that take
    their turn come every so often, however many others are urgent.
    """

    def __init__(
        self, *, by_deadline: bool = False, ageing_s: float = AGEING_S, turn: Turn = Turn.LEAST_WORK
    ) -> None:
        self._by_deadline, self._ageing_s, self._turn = by_deadline, ageing_s, turn
        self._waiting: dict[Key, QueuedRows] = {}
        self._jobs: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()
        self.totals = LineTotals()
        """What the rows that wait ask for, summed up."""
        self._tickets = itertools.count()
        self._shares = FairShares[str]()
        self._favoured = 0
        """Jobs that were served for their deadline, one after the other."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[QueuedRows]:
        return iter(self._waiting.values())

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """How many rows wait, by name and digest of the models that jobs wait for."""
        return self._models

    def join(
        self,
        job_id: str,
        demand: Demand,
        claim: Claim,
        now: float,
        *,
        rows: Sequence[int] | None = None,
        fetching: str | None = None,
    ) -> QueuedRows:
        """Let rows of a job wait for their tenant's turn; `rows` are their indices, by default counted from 0."""
        self._shares.join(claim.tenant, claim.weight)
        ticket = next(self._tickets)
        indices = tuple(range(demand.rows) if rows is None else rows)
        demand = replace(demand, ticket=ticket)
        joined = QueuedRows((job_id, ticket), indices, demand, claim, now, fetching=fetching)
        self._waiting[joined.key] = joined
        self._jobs[job_id] += 1
        self._models[joined.model] += len(joined.rows)
        self.totals.count(claim.priority, demand, 1)
        return joined

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> Demand:
        """Take `rows`, which have got a worker, out of the line, and return what they ask for.

        `now` is that of the order by which they were served. `passes` is a job that came before them and is served
        later, since there is no room for it.
        """
        entry = self._waiting[key]
        if passes is not None:
            passed = self._waiting[passes]
            self._waiting[passes] = replace(passed, passed=passed.passed + len(rows))
        shapes = (shape for row, shape in zip(entry.rows, entry.demand.shapes, strict=True) if row in rows)
        served = replace(entry.asked(now), shapes=tuple(shapes))
        self._shares.charge(entry.claim.tenant, max(1, served.steps))
        if len(rows) == len(entry.rows):
            self._favoured = self._favoured + 1 if self._due_s(entry, now) < math.inf else 0
            self.leave(key)
        else:
            left = self._waiting[key] = entry.without(rows)
            self._models[entry.model] -= len(rows)
            self.totals.count(entry.claim.priority, entry.demand, -1)
            self.totals.count(entry.claim.priority, left.demand, 1)
        return served

    def leave(self, key: Key) -> None:
        """Take all rows of an entry out of the line, if it has any."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return
        _count_off(self._jobs, entry.job_id)
        _count_off(self._models, entry.model, len(entry.rows))
        self.totals.count(entry.claim.priority, entry.demand, -1)
        self._shares.leave(entry.claim.tenant)

    def order(self, now: float) -> list[QueuedRows]:
        """All that wait, in the order of their turns."""
        ordered = self._by_turns(now)
        if self._favoured >= FAVOURED:
            by_turn = (e for e in ordered if self._aged(e, now) and self._due_s(e, now) == math.inf)
            if (first := next(by_turn, None)) is not None:
                ordered.remove(first)
                ordered.insert(0, first)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """When the order changes next if no job joins or leaves; None if it does not."""
        times: list[float] = []
        for entry in self:
            claim = entry.claim
            if self._by_deadline or claim.priority is Priority.BATCH:
                times.append(entry.since_s + self._ageing_s)
            if self._by_deadline and claim.finish_by_s is not None:
                times.append(claim.finish_by_s - claim.takes_s)
        return min((time_s for time_s in times if time_s > now), default=None)

    def _by_turns(self, now: float) -> list[QueuedRows]:
        tenants = defaultdict[str, list[tuple[_Rank, QueuedRows]]](list)
        for entry in self:
            tenants[entry.claim.tenant].append((self._rank(entry, now), entry))
        turns: list[tuple[bool, float, float, int, QueuedRows]] = []
        for tenant, own in tenants.items():
            tag = self._shares.tag(tenant)
            for (yields, due_s, *_, ticket), entry in sorted(own, key=itemgetter(0)):
                turns.append((yields, due_s, tag, ticket, entry))
                tag += entry.demand.steps / entry.claim.weight
        turns.sort(key=itemgetter(0, 1, 2, 3))
        return [entry for *_, entry in turns]

    def _rank(self, entry: QueuedRows, now: float) -> _Rank:
        yields = entry.claim.priority is Priority.BATCH and not self._aged(entry, now)
        turn_s = entry.since_s
        if self._turn is Turn.LEAST_WORK:
            whole = entry.demand.together or entry.demand.alone
            turn_s = -math.inf if whole else turn_s + DEFERRED * entry.takes_s
        return yields, self._due_s(entry, now), turn_s, entry.key[1]

    def _aged(self, entry: QueuedRows, now: float) -> bool:
        return now - entry.since_s >= self._ageing_s

    def _due_s(self, entry: QueuedRows, now: float) -> float:
        """The deadline as long as it can be met; infinite otherwise."""
        claim = entry.claim
        if not self._by_deadline or claim.finish_by_s is None or claim.finish_by_s - claim.takes_s <= now:
            return math.inf
        return claim.finish_by_s


def _count_off(counted: Counter[H], one: H, times: int = 1) -> None:
    counted[one] -= times
    if not counted[one]:
        del counted[one]
