"""When a job will have been computed that no worker has yet. Pure.

By levelling: what workers have to compute ends at different times; what waits, spread so that all workers end together,
ends at a level that depends on how much comes before. It is exact for work that can be divided, and late rather than
early for jobs that share steps.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from giornata.scheduling.demand import Demand


class Prospect(NamedTuple):
    """One worker, or several alike."""

    drained_ms: float
    """Until all that it has is computed, from now."""
    job_ms: float
    """That a job takes there."""
    workers: float = 1.0
    """For which it stands."""


def finish_ms(prospects: Iterable[Prospect], jobs_ahead: float) -> float | None:
    """Until a job and all before it are computed; None where no worker serves it, or nobody knows what it costs.

    Args:
        prospects: of the workers that serve it.
        jobs_ahead: how much comes before it, in jobs like it.
    """
    workers = sorted(prospects)
    if not workers or any(worker.job_ms <= 0 for worker in workers):
        return None
    alone_ms = min(worker.job_ms for worker in workers)
    level_ms, rate, left = workers[0].drained_ms, 0.0, jobs_ahead + 1.0
    for index, worker in enumerate(workers):
        rate += worker.workers / worker.job_ms
        following = workers[index + 1].drained_ms if index + 1 < len(workers) else float("inf")
        room = (following - level_ms) * rate
        if room >= left:
            return max(alone_ms, level_ms + left / rate)
        level_ms, left = following, left - room
    return None


def size(demand: Demand) -> float:
    """In token steps: to compare what jobs ask for."""
    return float(
        sum((shape.text + shape.computed) * shape.sequences * shape.steps for shape in demand.shapes)
    )
