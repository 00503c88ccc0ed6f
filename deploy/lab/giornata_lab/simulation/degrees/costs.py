"""What steps of a simulated pool's rows take: alone, moved to other devices, and together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Final, cast

from giornata.scheduling.degrees.pool import PoolRow, Times
from giornata_lab.simulation.degrees import derived
from giornata_lab.simulation.degrees.workloads import PoolRowSize

MOST_ROWS: Final = 8
"""Rows that share a step."""


@cache
def times(size: PoolRowSize, degrees: tuple[int, ...]) -> Times:
    """Seconds of a step by degree, on ``h100-eager``."""
    return {k: derived.eager_s(k, size.tokens, size.computed) for k in degrees}


@cache
def moved_times(size: PoolRowSize, degrees: tuple[int, ...]) -> Times:
    """Seconds of the first step, and of one on other devices: it computes all tokens."""
    return times(PoolRowSize(size.side, size.tokens), degrees)


def shared_s(parts: Sequence[tuple[PoolRowSize, bool]], degree: int) -> float:
    """Seconds of a step of several rows, each of which computes its tokens or, where told so, all of its picture."""
    return _shared_s(tuple(sorted((s.tokens if full else s.computed, s.tokens) for s, full in parts)), degree)


@cache
def _shared_s(parts: tuple[tuple[int, int], ...], degree: int) -> float:
    own = sum(derived.TEXT + computed for computed, _ in parts)
    operations = sum(
        derived.LINEAR * (derived.TEXT + computed)
        + derived.PAIR * (derived.TEXT + computed) * (derived.TEXT + tokens)
        for computed, tokens in parts
    )
    alone = derived.batch_s(degree, own, operations)
    return derived.EAGER * (alone + (derived.EAGER_S if degree > 1 else 0.0))


def together(rows: Sequence[PoolRow], degree: int) -> float | None:
    """Seconds of a step of `rows`; see :class:`giornata.scheduling.degrees.pool.SharedStepTime`."""
    if len(rows) > MOST_ROWS:
        return None
    return shared_s([(cast("PoolRowSize", row.size), False) for row in rows], degree)
