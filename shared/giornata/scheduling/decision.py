"""What a scheduler is asked and what it answers. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from giornata.scheduling.line import Key, Line
from giornata.scheduling.occupancy import Attempt
from giornata.scheduling.placement import Placement


class Placed(NamedTuple):
    """Rows that one worker gets together, as one attempt."""

    key: Key
    """Where they wait in the line."""
    worker: str
    rows: tuple[int, ...]
    """Their indices."""
    passes: Key | None = None
    """The job that came before them and has to wait, since no worker has room for it."""


class Decision(NamedTuple):
    """What happens now. Who asked applies it, in this order, before the next decision."""

    placements: tuple[Placed, ...] = ()
    preemptions: tuple[Attempt, ...] = ()
    """Attempts that their workers drop; the rows join the line again and count as not lost."""
    wake_at: float | None = None
    """When to ask again though nothing has happened, in seconds, after `now`; None: only when something has."""


class Scheduler(Protocol):
    """Chooses which waiting rows go to which workers."""

    def decide(self, line: Line, placement: Placement, now: float) -> Decision:
        """What happens now; `line` and `placement` are as before when it returns.

        Args:
            line: the rows that wait.
            placement: the workers and what they have.
            now: seconds, of the clock that `line` and `placement` are fed with.
        """
