"""What waits in the line, summed up by priority while jobs join and leave. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from giornata.scheduling.demand import Demand
from giornata.wire.jobs import Priority


@dataclass
class Total:
    """Sums over entries of the line. Sizes are whole numbers, so that nothing is lost by adding and taking away."""

    jobs: int = 0
    rows: int = 0
    steps: int = 0
    size: float = 0.0
    """See :attr:`giornata.scheduling.demand.Demand.size`."""

    def count(self, demand: Demand, sign: int) -> None:
        """Add what a job asks for (`sign` 1), or take it away (-1)."""
        self.jobs += sign
        self.rows += sign * demand.rows
        self.steps += sign * demand.steps
        self.size += sign * demand.size

    def __add__(self, other: Total) -> Total:
        return Total(
            self.jobs + other.jobs, self.rows + other.rows, self.steps + other.steps, self.size + other.size
        )


class LineTotals:
    """A :class:`Total` for each priority."""

    def __init__(self) -> None:
        self._by_priority = {priority: Total() for priority in Priority}
        self.adapted = 0
        """Entries that need adapters."""

    def count(self, priority: Priority, demand: Demand, sign: int) -> None:
        """See :meth:`Total.count`."""
        self._by_priority[priority].count(demand, sign)
        self.adapted += sign * bool(demand.adapters)

    def before(self, priority: Priority) -> Total:
        """What comes before a new job of `priority`: batch jobs never before an interactive one."""
        interactive = self._by_priority[Priority.INTERACTIVE]
        return interactive if priority is Priority.INTERACTIVE else self.all

    @property
    def all(self) -> Total:
        """The sum over all."""
        return self._by_priority[Priority.INTERACTIVE] + self._by_priority[Priority.BATCH]
