"""How fast each worker computes steps, from telemetry alone. Pure: time is an argument.

A figure that does not follow from recent telemetry is None, which is shown as *unknown*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from giornata.wire.workers import ServiceState, StepSample

WINDOW_S: Final = 5.0
"""Steps per second are counted over this long."""
SHORTEST_S: Final = 0.5
"""Over less than this, a count says nothing."""
SAMPLES_S: Final = 60.0
"""Step times older than this say nothing about the next step."""
MAX_SAMPLES: Final = 128


@dataclass
class _Seen:
    """The telemetry of one worker."""

    totals: deque[tuple[float, int]] = field(default_factory=deque)
    """(when, row steps since its start)."""
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    """(when, milliseconds of one engine step)."""


class StepRates:
    """How fast each worker was lately; feed it every telemetry message.

    A restarted worker has another instance name, so that its figures begin with it.
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
