"""What waits in the line, summed up by priority while jobs join and leave. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from giornata.scheduling.demand import JobDemand
from giornata.wire.jobs import Priority


@dataclass
class DemandTotal:
    """Sums over entries of the line. Sizes are whole numbers, so that nothing is lost by adding and taking away."""

    jobs: int = 0
    rows: int = 0
    steps: int = 0
    size: float = 0.0
    """See :attr:`giornata.scheduling.demand.JobDemand.size`."""

    def count(self, demand: JobDemand, sign: int) -> None:
        """Add what a job asks for (`sign` 1), or take it away (-1)."""
        self.jobs += sign
        self.rows += sign * demand.rows
        self.steps += sign * demand.steps
        self.size += sign * demand.size

    def __add__(self, other: DemandTotal) -> DemandTotal:
        return DemandTotal(
            self.jobs + other.jobs, self.rows + other.rows, self.steps + other.steps, self.size + other.size
        )


class QueueTotals:
    """A :class:`DemandTotal` for each priority."""

    def __init__(self) -> None:
        self._by_priority = {priority: DemandTotal() for priority in Priority}
        self.adapted = 0
        """Entries that need adapters."""

    def count(self, priority: Priority, demand: JobDemand, sign: int) -> None:
        """See :meth:`DemandTotal.count`."""
        self._by_priority[priority].count(demand, sign)
        self.adapted += sign * bool(demand.adapters)

    def before(self, priority: Priority) -> DemandTotal:
        """What comes before a new job of `priority`: batch jobs never before an interactive one."""
        interactive = self._by_priority[Priority.INTERACTIVE]
        return interactive if priority is Priority.INTERACTIVE else self.all

    @property
    def all(self) -> DemandTotal:
        """The sum over all."""
        return self._by_priority[Priority.INTERACTIVE] + self._by_priority[Priority.BATCH]
