"""Rows as workers tell of them, in the shapes that costs are of. Pure."""

from __future__ import annotations

from giornata.scheduling.demand import RowShape
from giornata.wire.workers import RowProgress


def computed_of(row: RowProgress) -> int:
    """Image tokens that its next step computes, companions among them, unless that is its first."""
    if row.computed_tokens is None:
        return row.tokens + row.companion_tokens
    return row.computed_tokens


def left_of(row: RowProgress) -> int:
    """Steps still to compute, at least 1."""
    return max(1, row.steps - row.step)


def reuses(row: RowProgress) -> bool:
    """Whether it takes from a template, and not what its own steps in full make."""
    return computed_of(row) < row.tokens + row.companion_tokens and not row.renewed_every


def shape_of(row: RowProgress) -> RowShape:
    """What it computes."""
    return RowShape(
        row.text_tokens,
        row.tokens + row.companion_tokens,
        computed_of(row),
        left_of(row),
        row.sequences,
        row.begun,
        padding=row.padding_tokens,
        prefix=row.prefix_tokens,
        low_rank=row.low_rank,
        skipped=min(row.skipped_steps, left_of(row) - 1),
        segments=1 / row.sequences if row.low_rank else 0.0,
        control=row.control,
    )
