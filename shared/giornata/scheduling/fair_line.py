"""The line that is used by default: fair between tenants, by priority, never starving. Pure.

Tenants take turns by their shares (:mod:`giornata.scheduling.shares`). A tenant's jobs come in the order of their
arrival, but each is deferred by a multiple of its work that no worker has: small jobs pass large ones, since so most
jobs end soonest, but only those that come soon after. Jobs whose rows stay together come before all others of their
tenant. Batch jobs come after interactive ones until they have waited for a while.
"""

from __future__ import annotations

import math
from collections import defaultdict
from enum import StrEnum
from operator import itemgetter
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.line import AGEING_S, QueuedRows
from giornata.scheduling.queued_rows import RowQueueBase
from giornata.scheduling.shares import FairShares
from giornata.wire.jobs import Priority

DEFERRED: Final = 5.0
"""A job comes after the jobs of its tenant that arrive within so many times its own work."""
FAVOURED: Final = 8
"""Jobs with a deadline that may come before one that has waited for :data:`AGEING_S`; then it is its turn."""
_Rank = tuple[bool, float, float, int]
"""What orders a tenant's jobs: whether it yields to interactive ones, its deadline, its deferred arrival, ticket."""


class TenantJobOrder(StrEnum):
    """Which of a tenant's jobs comes first."""

    LEAST_WORK = "least_work"
    """The least by its arrival and :data:`DEFERRED` times its work that no worker has."""
    ARRIVAL = "arrival"
    """The one that arrived first."""


class FairQueue(RowQueueBase):
    """See :class:`giornata.scheduling.line.RowQueue`.

    `turn` says which job of a tenant comes first. `by_deadline`, jobs of a class that wish to end by a time come first,
    the earliest first, as long as they can; a job that cannot any more has no claim and takes its turn. Jobs that take
    their turn come every so often, however many others are urgent. `by_ends`, tenants come by the virtual time at which
    their next work ends, not begins: where works differ a thousandfold, a small one does not wait for a large one.
    """

    def __init__(
        self,
        *,
        by_deadline: bool = False,
        ageing_s: float = AGEING_S,
        turn: TenantJobOrder = TenantJobOrder.LEAST_WORK,
        by_ends: bool = False,
    ) -> None:
        super().__init__()
        self._by_deadline, self._ageing_s, self._turn = by_deadline, ageing_s, turn
        self._by_ends = by_ends
        self._shares = FairShares[str]()
        self._favoured = 0
        """Jobs that were served for their deadline, one after the other."""

    def order(self, now: float) -> list[QueuedRows]:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        ordered = self._by_turns(now)
        if self._favoured >= FAVOURED:
            by_turn = (e for e in ordered if self._aged(e, now) and self._due_s(e, now) == math.inf)
            if (first := next(by_turn, None)) is not None:
                ordered.remove(first)
                ordered.insert(0, first)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
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
                end = tag + entry.demand.steps / entry.claim.weight
                turns.append((yields, due_s, end if self._by_ends else tag, ticket, entry))
                tag = end
        turns.sort(key=itemgetter(0, 1, 2, 3))
        return [entry for *_, entry in turns]

    def _rank(self, entry: QueuedRows, now: float) -> _Rank:
        yields = entry.claim.priority is Priority.BATCH and not self._aged(entry, now)
        turn_s = entry.since_s
        if self._turn is TenantJobOrder.LEAST_WORK:
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

    def _joined(self, entry: QueuedRows, now: float) -> None:  # noqa: ARG002 - other lines need the time
        self._shares.join(entry.claim.tenant, entry.claim.weight)

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:
        self._shares.charge(entry.claim.tenant, max(1, served.steps))
        if whole:
            self._favoured = self._favoured + 1 if self._due_s(entry, now) < math.inf else 0

    def _left(self, entry: QueuedRows) -> None:
        self._shares.leave(entry.claim.tenant)
