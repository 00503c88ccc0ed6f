"""Which rows are the next batch. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class WaitingRow:
    """A row that waits."""

    alike: Hashable
    """Rows of one batch have equal ones."""
    since: float
    """Seconds of the caller's clock."""


@dataclass(frozen=True)
class Rule:
    """When a batch begins."""

    size: int
    """Most rows of a batch."""
    window_s: float
    """Longest wait of a row for others, while the pipeline is free."""


def next_batch(waiting: Sequence[WaitingRow], rule: Rule, now: float) -> list[int]:
    """Places in `waiting` of the rows that are computed now; empty while they wait for others.

    The row that came first decides once its window is over, so that no kind of row waits for ever; before, the first
    batch that is full.

    Args:
        waiting: in the order of their arrival.
        rule: when a batch begins.
        now: in seconds of the same clock.
    """
    if waiting and now >= waiting[0].since + rule.window_s:
        return _alike(waiting, waiting[0], rule.size)
    for alike in dict.fromkeys(row.alike for row in waiting):
        first = next(row for row in waiting if row.alike == alike)
        places = _alike(waiting, first, rule.size)
        if len(places) == rule.size:
            return places
    return []


def _alike(waiting: Sequence[WaitingRow], row: WaitingRow, size: int) -> list[int]:
    return [place for place, other in enumerate(waiting) if other.alike == row.alike][:size]
