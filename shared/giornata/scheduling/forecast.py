"""When a job will have been computed that no worker has yet. Pure.

By levelling: what workers have to compute ends at different times; what waits, spread so that all workers end together,
ends at a level that depends on how much comes before. It is exact for work that can be divided, and late rather than
early for jobs that share steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from giornata.scheduling.demand import Demand


class Prospect(NamedTuple):
    """One worker, or several alike."""

    drained_ms: float
    """Until all that it has is computed, from now."""
    row_ms: float
    """That a row takes there."""
    workers: float = 1.0
    """For which it stands."""


class Computed(NamedTuple):
    """When a job will be."""

    finish_ms: float
    """From now, after all before it."""
    alone_ms: float
    """If nothing were before it."""


def computed(prospects: Sequence[Prospect], ahead: float, rows: float) -> Computed | None:
    """When a job's rows are computed, each by any worker; None where none serves it, or nobody knows what it costs.

    Args:
        prospects: of the workers that serve it.
        ahead: how much comes before it, in rows like its own.
        rows: its own.
    """
    if not prospects or any(worker.row_ms <= 0 for worker in prospects):
        return None
    idle = [worker._replace(drained_ms=0.0) for worker in prospects]
    return Computed(_level_ms(prospects, ahead + rows), _level_ms(idle, rows))


def _level_ms(prospects: Sequence[Prospect], rows: float) -> float:
    """At which all workers end together that have to compute so many more."""
    workers = sorted(prospects)
    alone_ms = min(worker.row_ms for worker in workers)
    level_ms, rate, left = workers[0].drained_ms, 0.0, rows
    for index, worker in enumerate(workers):
        rate += worker.workers / worker.row_ms
        following = workers[index + 1].drained_ms if index + 1 < len(workers) else float("inf")
        room = (following - level_ms) * rate
        if room >= left:
            return max(alone_ms, level_ms + left / rate)
        level_ms, left = following, left - room
    raise AssertionError("after the last worker there is room for everything")


def size(demand: Demand) -> float:
    """In token steps: to compare what jobs ask for."""
    return float(
        sum((shape.text + shape.computed) * shape.sequences * shape.steps for shape in demand.shapes)
    )
