"""Which rows are the next batch. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar


@dataclass(eq=False)
class BatchCandidate:
    """A row that waits."""

    alike: Hashable
    """Rows of one batch have equal ones."""
    since: float
    """Seconds of the caller's clock."""


@dataclass(frozen=True)
class BatchPolicy:
    """When a batch begins."""

    size: int
    """Most rows of a batch."""
    window_s: float
    """Longest wait of a row for others, while the pipeline is free."""


Row = TypeVar("Row", bound=BatchCandidate)


def next_batch(waiting: Sequence[Row], rule: BatchPolicy, now: float) -> list[Row]:
    """The rows of `waiting`, in the order of their arrival, that are computed now; none while they wait for others.

    The row that came first decides once its window is over, so that no kind of row waits for ever; before, the first
    batch that is full.
    """
    kinds: dict[Hashable, list[Row]] = {}
    for row in waiting:
        kinds.setdefault(row.alike, []).append(row)
    batches = [rows[: rule.size] for rows in kinds.values()]
    if waiting and now >= waiting[0].since + rule.window_s:
        return batches[0]
    return next((batch for batch in batches if len(batch) == rule.size), [])
