"""The books that every line keeps: what waits, of which jobs and models. Pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.line import LOOK_S, RELOOK_S, Key, QueuedRows, SchedulingParams
from giornata.scheduling.totals import QueueTotals

H = TypeVar("H", bound=Hashable)


class RowQueueBase:
    """Rows by entry. Lines add the order: they are told of each entry that joins, is served and leaves."""

    def __init__(self) -> None:
        self._waiting: dict[Key, QueuedRows] = {}
        self._jobs: Counter[str] = Counter()
        self._models: Counter[tuple[str, str]] = Counter()
        self._totals = QueueTotals()
        self._tickets = itertools.count()
        self._looked_s = -math.inf
        self._changed = False
        """Whether somebody has joined or left since."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._jobs

    def __iter__(self) -> Iterator[QueuedRows]:
        return iter(self._waiting.values())

    @property
    def totals(self) -> QueueTotals:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        return self._totals

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        return self._models

    def join(
        self,
        job_id: str,
        demand: JobDemand,
        claim: SchedulingParams,
        now: float,
        *,
        rows: Sequence[int] | None = None,
        fetching: str | None = None,
    ) -> QueuedRows:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        ticket = next(self._tickets)
        indices = tuple(range(demand.rows) if rows is None else rows)
        demand = replace(demand, ticket=ticket)
        told = frozenset[str]() if fetching is None else frozenset({fetching})
        joined = QueuedRows((job_id, ticket), indices, demand, claim, now, fetching=fetching, told=told)
        self._waiting[joined.key] = joined
        self._jobs[job_id] += 1
        self._models[joined.model] += len(joined.rows)
        self._totals.count(claim.priority, demand, 1)
        self._changed = True
        self._joined(joined, now)
        return joined

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> JobDemand:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        entry = self._waiting[key]
        if passes is not None:
            passed = self._waiting[passes]
            self._waiting[passes] = replace(passed, passed=passed.passed + len(rows))
        shapes = (shape for row, shape in zip(entry.rows, entry.demand.shapes, strict=True) if row in rows)
        served = replace(entry.asked(now), shapes=tuple(shapes))
        self._changed = True
        self._served(entry, served, now, whole=len(rows) == len(entry.rows))
        if len(rows) == len(entry.rows):
            self.leave(key)
        else:
            left = self._waiting[key] = entry.without(rows)
            self._models[entry.model] -= len(rows)
            self._totals.count(entry.claim.priority, entry.demand, -1)
            self._totals.count(entry.claim.priority, left.demand, 1)
        return served

    def tell(self, key: Key, worker: str) -> None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        entry = self._waiting[key]
        self._waiting[key] = replace(entry, fetching=worker, told=entry.told | {worker})

    @property
    def looks_at(self) -> float | None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        if not self._totals.adapted:
            return None
        return self._looked_s + (LOOK_S if self._changed else RELOOK_S)

    def looked(self, now: float) -> None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        self._looked_s, self._changed = now, False

    def leave(self, key: Key) -> None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        entry = self._waiting.pop(key, None)
        if entry is None:
            return
        self._changed = True
        _count_off(self._jobs, entry.job_id)
        _count_off(self._models, entry.model, len(entry.rows))
        self._totals.count(entry.claim.priority, entry.demand, -1)
        self._left(entry)

    def _joined(self, entry: QueuedRows, now: float) -> None:
        """An entry waits from now on."""
        raise NotImplementedError

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        """Rows of an entry have got a worker, or all of them: the entry leaves next."""
        raise NotImplementedError

    def _left(self, entry: QueuedRows) -> None:
        """An entry waits no more."""
        raise NotImplementedError


def _count_off(counted: Counter[H], one: H, times: int = 1) -> None:
    counted[one] -= times
    if not counted[one]:
        del counted[one]
