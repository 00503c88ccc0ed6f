"""Workers that take rows of one model now, ordered by what they have to compute and by their room. Pure.

A decision looks at a few of them, so that it costs about the same for eight workers and for a thousand.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.occupancy import WorkerOccupancy, WorkerTotals

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
    """Which workers have what."""

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
        """Whether a worker could take `demand` now; workers that have changed are summed up until one can."""
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
