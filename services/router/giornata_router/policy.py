"""Choosing a worker. Policies are plain functions of one signature, so that they can be compared. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Demand:
    """What a job asks of a worker."""

    model: str
    model_digest: str
    rows: int
    tokens: int
    """Image tokens of all rows."""
    steps: int
    """Row steps: the sum over rows of the steps still to compute."""


@dataclass(frozen=True)
class Candidate:
    """A worker that could take the job, with what it already has."""

    instance: str
    capacity_rows: int
    rows: int
    tokens: int
    remaining_steps: int
    """Row steps still to compute, of running, waiting and just assigned rows."""


Policy = Callable[[Sequence[Candidate], Demand], Candidate | None]
"""The chosen candidate, or None when none has room. Candidates are never empty of fields, but may be an empty list."""


def least_remaining_steps(candidates: Sequence[Candidate], demand: Demand) -> Candidate | None:
    """The worker that will have computed all it has soonest, counted in row steps."""
    return min(
        with_room(candidates, demand), key=lambda c: (c.remaining_steps, c.tokens, c.instance), default=None
    )


def fewest_rows(candidates: Sequence[Candidate], demand: Demand) -> Candidate | None:
    """The worker with the fewest rows: request-level balancing, the baseline of FlashPS section 6.5."""
    return min(with_room(candidates, demand), key=lambda c: (c.rows, c.instance), default=None)


POLICIES: Final[dict[str, Policy]] = {
    "least_remaining_steps": least_remaining_steps,
    "fewest_rows": fewest_rows,
}


def with_room(candidates: Sequence[Candidate], demand: Demand) -> list[Candidate]:
    """Those that can take the job now.

    An empty worker always has room: a job larger than every capacity must still run somewhere.
    """
    return [c for c in candidates if c.rows == 0 or c.rows + demand.rows <= c.capacity_rows]
