"""Which rows of a job go where: what one worker gets in the same moment is one attempt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from giornata.scheduling.demand import Demand
from giornata.wire.jobs import Assignment


class Pieces:
    """Rows that are placed piece by piece, in order.

    Args:
        rows: their indices.
        demand: of all of them.
        number: numbers the job's attempts.
    """

    def __init__(self, rows: Sequence[int], demand: Demand, number: Callable[[], int]) -> None:
        self._left, self._shapes = list(rows), dict(zip(rows, demand.shapes, strict=True))
        self._demand, self._number = demand, number
        self._placed: dict[str, Assignment] = {}

    @property
    def left(self) -> Sequence[int]:
        """Rows that have got no worker."""
        return self._left

    @property
    def placed(self) -> Collection[Assignment]:
        """What nobody has taken yet."""
        return self._placed.values()

    def give(self, worker: str, rows: int) -> tuple[Assignment, Demand]:
        """So many more go to `worker`; all that go there now, and what these ask."""
        now, self._left = self._left[:rows], self._left[rows:]
        known = self._placed.get(worker) or Assignment(self._number(), worker, ())
        given = self._placed[worker] = known._replace(rows=(*known.rows, *now))
        return given, replace(self._demand, shapes=tuple(self._shapes[row] for row in given.rows))

    def take(self) -> list[Assignment]:
        """Those made since this was asked last; what a worker gets later is another attempt."""
        taken, self._placed = list(self._placed.values()), {}
        return taken
