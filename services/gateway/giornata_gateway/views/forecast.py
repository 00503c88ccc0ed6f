"""How fast the fleet works and how long a new picture would wait, from telemetry alone. Pure: time is an argument.

Nothing is guessed: where a number does not follow from what was told lately, it is None, which is shown as *unknown*.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from giornata.wire.workers import QueueState, ServiceState, StepSample, WorkerState

WINDOW_S: Final = 5.0
"""Steps per second are counted over this long."""
SHORTEST_S: Final = 0.5
"""Over less than this, a count says nothing."""
SAMPLES_S: Final = 60.0
"""Step times older than this say nothing about the next step."""
MAX_SAMPLES: Final = 128


@dataclass
class _Seen:
    """What one worker has told."""

    totals: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, row steps since its start)."""
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    """(when, milliseconds of one engine step)."""


class Pace:
    """How fast each worker was lately; feed it every telemetry message.

    A restarted worker has another instance name, and so begins anew.
    """

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in one telemetry message, at `now` seconds of any monotonic clock."""
        if state.worker is None:
            return
        seen = self._seen.setdefault(state.instance, _Seen())
        seen.totals.append((now, state.worker.steps_total))
        while len(seen.totals) > 2 and seen.totals[1][0] <= now - WINDOW_S:
            seen.totals.popleft()
        seen.samples.extend((now, sample.step_ms) for sample in _busy(state.worker.samples))

    def forget(self, instance: str) -> None:
        """The worker is gone."""
        self._seen.pop(instance, None)

    def steps_per_s(self, instance: str) -> float | None:
        """Row steps per second over the last :data:`WINDOW_S`; None when it was not heard for long enough."""
        seen = self._seen.get(instance)
        if seen is None:
            return None
        (first_s, first), (last_s, last) = seen.totals[0], seen.totals[-1]
        return (last - first) / (last_s - first_s) if last_s - first_s >= SHORTEST_S else None

    def step_ms(self, instance: str, now: float) -> float | None:
        """Median time of an engine step, in which every running row advances by one; None without recent ones."""
        seen = self._seen.get(instance)
        recent = [] if seen is None else [ms for when, ms in seen.samples if now - when <= SAMPLES_S]
        return median(recent) if recent else None


def _busy(samples: Iterable[StepSample]) -> list[StepSample]:
    return [sample for sample in samples if sample.rows > 0]


@dataclass(frozen=True)
class Load:
    """One ready worker and its pace."""

    worker: WorkerState
    step_ms: float | None


def predicted_wait_s(loads: Iterable[Load], queue: QueueState | None) -> float | None:
    """Seconds until the denoising of one more picture could begin, if nothing else came; None when it is unknown.

    A simulation: every worker has as many places as its capacity in rows; a running row leaves its place after the
    steps it has left, at the worker's median step time; a worker's waiting rows take its places in order; the rows
    that wait at the router, all of mean length, take whatever place is free first, and the new picture comes last.
    Step times are taken as they are now, though they change with the batch.

    Args:
        loads: of the ready workers.
        queue: what the active router told of those who wait; None when there is none. A full one hides others.
    """
    if queue is None or queue.full:
        return None
    places: list[
        tuple[float, int, float]
    ] = []  # when a place is free, its number, milliseconds of a step there
    for load in loads:
        free = _free_at_ms(load)
        if free is None:
            return None
        places += [(at, len(places) + i, load.step_ms or 0.0) for i, at in enumerate(free)]
    if not places:
        return None
    heapq.heapify(places)
    if queue.rows and any(step_ms == 0.0 for _, _, step_ms in places):
        return None  # an idle worker whose pace nobody has seen is about to take them
    for _ in range(queue.rows):
        at, number, step_ms = places[0]
        heapq.heapreplace(places, (at + queue.steps / queue.rows * step_ms, number, step_ms))
    return places[0][0] / 1000


def _free_at_ms(load: Load) -> list[float] | None:
    """When each of a worker's places is free, in milliseconds from now; None when that is unknown."""
    worker = load.worker
    rows = [*worker.running, *worker.waiting]
    if not rows:
        return [0.0] * worker.capacity_rows
    if load.step_ms is None:
        return None
    places = [0.0] * max(worker.capacity_rows, len(worker.running))
    heapq.heapify(places)
    for row in rows:
        heapq.heapreplace(places, places[0] + (row.steps - row.step) * load.step_ms)
    return places
