"""Who waits for a worker, and who comes next: fair between tenants, by priority, and never starving. Pure.

Within a class jobs come in the order of start tags (start-time fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996): a
job's tag is the virtual time at its arrival, or where its tenant's last job ends if that is later; the job then moves
its tenant on by its work over the tenant's weight. So a tenant with a thousand jobs delays another's single one by
about one job, and a lone tenant's jobs come in order. Batch jobs come after interactive ones until they have waited for
a while.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Final

from giornata.scheduling.demand import Demand
from giornata.wire.jobs import Priority

AGEING_S: Final = 30.0
"""A batch job that has waited for so long comes as if it were interactive."""
FAVOURED: Final = 8
"""Jobs with a deadline that may come before one that has waited for :data:`AGEING_S`; then it is its turn."""


Key = tuple[str, int]
"""A job, and the number of its rows' entry: it may have several, where some of its rows came back."""


@dataclass(frozen=True)
class Turn:
    """What decides when a job comes."""

    priority: Priority = Priority.INTERACTIVE
    tenant: str = ""
    weight: float = 1.0
    """Of the tenant, above 0: with twice the weight, twice the share."""
    finish_by_s: float | None = None
    """When its rows should be computed, by the clock of `now`; None for no wish."""
    takes_s: float = 0.0
    """That computing them takes at least."""


@dataclass(frozen=True)
class Entry:
    """Rows of a job in the line."""

    key: Key
    demand: Demand
    """Of those that have no worker yet."""
    turn: Turn
    since_s: float
    tag: float
    """Start tag, in row steps over weight."""
    passed: int = 0
    """Later jobs of the same model that were served first, since they needed less room."""
    fetching: str | None = None
    """The worker that was told to read its template from disk, as the likely one."""

    @property
    def job_id(self) -> str:
        """Whose rows they are."""
        return self.key[0]

    @property
    def model(self) -> tuple[str, str]:
        """Name and digest."""
        return self.demand.model, self.demand.model_digest

    def asked(self, now: float) -> Demand:
        """What it asks of a worker, with the time that is left."""
        if self.turn.finish_by_s is None:
            return self.demand
        return replace(self.demand, within_ms=(self.turn.finish_by_s - now) * 1e3)


class Line:
    """Jobs that are prepared, with rows that no worker has taken yet.

    Args:
        by_deadline: among jobs of a class, those that wish to end by a time come first, the earliest first, as long as
            they can; a job that cannot any more has no claim and takes its turn. Jobs that take their turn come every
            so often, however many others are urgent.
        ageing_s: after which a batch job comes as if it were interactive.
    """

    def __init__(self, *, by_deadline: bool = False, ageing_s: float = AGEING_S) -> None:
        self._by_deadline, self._ageing_s = by_deadline, ageing_s
        self._entries: dict[Key, Entry] = {}
        self._jobs: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()
        self._tickets = itertools.count()
        self._virtual = 0.0
        self._ends: dict[str, float] = {}
        """By tenant: where its last job ends, in virtual time; those of the past are forgotten."""
        self._urgent: frozenset[Key] = frozenset()
        """Jobs that came by their deadline when the order was last asked for."""
        self._favoured = 0
        """Of these, so many were served one after the other."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def join(self, job_id: str, demand: Demand, turn: Turn, now: float, fetching: str | None = None) -> Entry:
        """At the place that is its tenant's turn; the demand's ticket is given here."""
        tag = max(self._virtual, self._ends.get(turn.tenant, 0.0))
        self._ends[turn.tenant] = tag + max(1, demand.steps) / turn.weight
        ticket = next(self._tickets)
        entry = Entry((job_id, ticket), replace(demand, ticket=ticket), turn, now, tag, fetching=fetching)
        self._entries[entry.key] = entry
        self._jobs[job_id] += 1
        self._models[demand.model, demand.model_digest] += 1
        return entry

    def serve(self, key: Key, rows: int) -> Entry | None:
        """So many of its first rows got a worker; the entry of the others, if there are any."""
        entry = self._entries[key]
        self._virtual = max(self._virtual, entry.tag)
        rest = replace(entry, demand=entry.demand.without(rows))
        if rest.demand.rows:
            self._entries[key] = rest
            return rest
        self._favoured = self._favoured + 1 if key in self._urgent else 0
        self.leave(key)
        return None

    def leave(self, key: Key) -> None:
        """All of its rows have workers, or nobody wants it any more; it may have left already."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return
        self._jobs -= Counter([entry.job_id])
        self._models -= Counter([entry.model])
        if not self._entries:
            self._ends = {tenant: end for tenant, end in self._ends.items() if end > self._virtual}

    def passed_by(self, key: Key) -> None:
        """A later job was served first."""
        entry = self._entries[key]
        self._entries[key] = replace(entry, passed=entry.passed + 1)

    def order(self, now: float) -> list[Entry]:
        """Everybody, who comes next first."""
        ordered = sorted(self._entries.values(), key=lambda entry: self._rank(entry, now))
        self._urgent = frozenset(e.key for e in ordered if self._due_s(e, now) < math.inf)
        if self._favoured >= FAVOURED:
            by_turn = (e for e in ordered if self._aged(e, now) and e.key not in self._urgent)
            first = next(by_turn, None)
            if first is not None:
                ordered.remove(first)
                ordered.insert(0, first)
        return ordered

    @property
    def models(self) -> Collection[tuple[str, str]]:
        """Names and digests of those that are waited for."""
        return self._models

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def _rank(self, entry: Entry, now: float) -> tuple[bool, float, float, int]:
        yields = entry.turn.priority is Priority.BATCH and not self._aged(entry, now)
        return yields, self._due_s(entry, now), entry.tag, entry.demand.ticket

    def _aged(self, entry: Entry, now: float) -> bool:
        return now - entry.since_s >= self._ageing_s

    def _due_s(self, entry: Entry, now: float) -> float:
        """Its deadline as long as it can be met."""
        turn = entry.turn
        if not self._by_deadline or turn.finish_by_s is None or turn.finish_by_s - turn.takes_s <= now:
            return math.inf
        return turn.finish_by_s
