"""ROCK's matching of queues and workers: weights, and the choice among the best (CLUSTER '25, section 4.1). Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from giornata.wire.workers import Tier

AFFINITY: Final = 0.6
UTILISATION: Final = 0.3
DELAY: Final = 0.1
"""Weights of the three terms."""
WANTED: Final = 0.7
"""Utilisation that a worker should have."""
BEST: Final = 3
"""Workers among which the least deviation of utilisations decides."""


class FreeWorker(NamedTuple):
    """A worker with a free place, as one queue sees it."""

    name: str
    affinity: float
    """Share of the queue's adapters that its device has, 0 to 1."""
    utilisation: float
    """Rows over places."""
    delay_ms: float
    """Time until the queue's first rows would be computed there, above 0."""


def affinity(wanted: Collection[str], held: Mapping[str, Tier]) -> float:
    """Share of the `wanted` adapters that are `held` on the device; 0 where none is wanted."""
    return sum(held.get(digest) is Tier.DEVICE for digest in wanted) / len(wanted) if wanted else 0.0


def weight(worker: FreeWorker, least_delay_ms: float) -> float:
    """0.6 of affinity, 0.3 of 1 - |u - 0.7|, 0.1 of the inverse delay.

    The delay's inverse is relative to that of the best worker. Taken in 1/seconds, as it is printed, it vanishes beside
    the other terms.
    """
    fit = 1 - abs(worker.utilisation - WANTED)
    return (
        AFFINITY * worker.affinity
        + UTILISATION * fit
        + DELAY * (least_delay_ms / worker.delay_ms if worker.delay_ms > 0 else 1.0)
    )


def weights(workers: Sequence[FreeWorker]) -> dict[str, float]:
    """By name of the worker."""
    least_ms = min((worker.delay_ms for worker in workers), default=0.0)
    return {worker.name: weight(worker, least_ms) for worker in workers}


def chosen(workers: Sequence[FreeWorker]) -> FreeWorker | None:
    """The one of the three heaviest workers with which utilisations deviate least: the least utilised."""
    if not workers:
        return None
    weighed = weights(workers)
    best = sorted(workers, key=lambda worker: (-weighed[worker.name], worker.name))[:BEST]
    return min(best, key=lambda worker: (worker.utilisation, -weighed[worker.name], worker.name))
