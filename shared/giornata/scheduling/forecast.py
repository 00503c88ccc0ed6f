"""When a job is computed that no worker has yet. Pure.

The forecast levels: the work of the workers ends at different times; waiting work, spread so that all workers end
together, ends at a level that depends on how much comes before it. The level is exact for work that can be divided, and
late rather than early for jobs that share steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from giornata.scheduling.demand import Demand


class Prospect(NamedTuple):
    """One worker, or several alike."""

    drained_ms: float
    """Time until all its rows are computed."""
    row_ms: float
    """Time that a row takes there."""
    workers: float = 1.0
    """How many it stands for."""


class Computed(NamedTuple):
    """When a job is computed."""

    finish_ms: float
    """Time from now, after all that comes before it."""
    alone_ms: float
    """Time if nothing came before it."""


def computed(prospects: Sequence[Prospect], ahead: float, rows: float) -> Computed | None:
    """When a job's rows are computed, each by any worker; None where no worker serves it or its cost is unknown.

    `prospects` are the workers that serve it, `ahead` is how much comes before it, in rows like its own.
    """
    if not prospects or any(worker.row_ms <= 0 for worker in prospects):
        return None
    idle = [worker._replace(drained_ms=0.0) for worker in prospects]
    return Computed(_level_ms(prospects, ahead + rows), _level_ms(idle, rows))


def _level_ms(prospects: Sequence[Prospect], rows: float) -> float:
    """The time at which all workers end together if they compute so many more rows."""
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
    """Token steps, to compare what jobs ask for."""
    return float(
        sum((shape.text + shape.computed) * shape.sequences * shape.steps for shape in demand.shapes)
    )
