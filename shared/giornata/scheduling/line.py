"""Jobs that wait for a worker, and what a line of them promises. Pure.

:mod:`giornata.scheduling.fair_line` has the line that is used by default, :mod:`giornata.scheduling.kinds_line` ROCK's
queues of alike jobs. Both keep :mod:`giornata.scheduling.queued_rows`'s books.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Protocol

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.totals import QueueTotals
from giornata.wire.jobs import Priority

AGEING_S: Final = 30.0
"""A batch job that has waited for so long comes as if it were interactive."""


LOOK_S: Final = 0.25
"""Least time between two looks at who probably computes the first in line: a bound on what they cost."""
RELOOK_S: Final = 1.0
"""Time after which they are looked at though nobody has joined or left: workers have gone on meanwhile."""


class QueueOrder(StrEnum):
    """What a line is called in configurations and simulations."""

    FAIR = "fair"
    """Tenants take turns by their shares."""
    KINDS = "kinds"
    """Queues of alike jobs take turns (ROCK, CLUSTER '25, section 4.1)."""


Key = tuple[str, int]
"""A job and a number: rows of one job may join the line several times, where some came back from a lost worker."""


@dataclass(frozen=True)
class SchedulingParams:
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
    demand: JobDemand
    """What these rows ask for, in the same order."""
    claim: SchedulingParams
    since_s: float
    passed: int = 0
    """Rows of later jobs of the same model that were served first, since they needed less room."""
    fetching: str | None = None
    """The worker that was told last to load the job's template and adapters, since it is the likely one."""
    told: frozenset[str] = frozenset()
    """All workers that were told so."""

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

    def asked(self, now: float) -> JobDemand:
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


class RowQueue(Protocol):
    """Jobs that are prepared, with rows that no worker has taken yet.

    No row is lost or served twice, and none waits for ever while others are served: the contract suite of lines
    (`tests/unit/scheduling/test_lines.py`) holds every implementation to that.
    """

    @property
    def totals(self) -> QueueTotals:
        """What the rows that wait ask for, summed up."""

    @property
    def models(self) -> Mapping[tuple[str, str], int]:
        """How many rows wait, by name and digest of the models that jobs wait for."""

    def __len__(self) -> int: ...

    def __contains__(self, job_id: object) -> bool: ...

    def __iter__(self) -> Iterator[QueuedRows]: ...

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
        """Let rows of a job wait for their turn; `rows` are their indices, by default counted from 0."""

    def serve(self, key: Key, rows: Collection[int], now: float, passes: Key | None = None) -> JobDemand:
        """Take `rows`, which have got a worker, out of the line, and return what they ask for.

        `now` is that of the order by which they were served. `passes` is a job that came before them and is served
        later, since there is no room for it.
        """

    def tell(self, key: Key, worker: str) -> None:
        """Note that `worker` was told to load what an entry needs, since it is the likely one."""

    def leave(self, key: Key) -> None:
        """Take all rows of an entry out of the line, if it has any."""

    def order(self, now: float) -> list[QueuedRows]:
        """All that wait, in the order of their turns."""

    def changes_at(self, now: float) -> float | None:
        """When the order changes next if no job joins or leaves; None if it does not."""

    @property
    def looks_at(self) -> float | None:
        """When the likely workers of those who wait are to be chosen anew; None where nobody needs adapters.

        :data:`LOOK_S` after they were last where the line has changed since, else :data:`RELOOK_S`.
        """

    def looked(self, now: float) -> None:
        """Note that likely workers are chosen `now`."""
