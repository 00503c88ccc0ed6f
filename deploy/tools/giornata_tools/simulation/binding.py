"""Giving a job to a worker at its arrival, as FlashPS does: jobs wait at workers, not in the line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from giornata.scheduling.line import Line
from giornata.scheduling.placement import Placement
from giornata.scheduling.policies import Policy
from giornata.scheduling.scheduler import Decision, Placed

EVER: Final = 1 << 30
"""Rows that a worker takes on."""


@dataclass(frozen=True)
class AtArrival:
    """Gives every job whole to the worker that the policy chooses, however full it is."""

    policy: Policy
    looked_at: int
    """How many of many workers the policy is asked about."""

    def decide(self, line: Line, placement: Placement, now: float) -> Decision:
        """See :class:`giornata.scheduling.scheduler.Scheduler`."""
        placed = []
        with placement.trial() as count:
            for entry in line.order(now):
                asked = entry.asked(now)
                known = placement.candidates(asked, self.looked_at)
                chosen = self.policy([c._replace(capacity_rows=EVER) for c in known], asked)
                if chosen is not None:
                    count(entry.job_id, chosen.instance, asked)
                    placed.append(Placed(entry.key, chosen.instance, entry.rows))
        return Decision(tuple(placed))
