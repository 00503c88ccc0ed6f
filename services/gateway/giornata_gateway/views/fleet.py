"""The fleet as ``/v1/fleet`` tells it: every instance, how fast it is, and what they can do together.

All follows from telemetry. Time is an argument. A figure that does not follow from recent telemetry is None, which is
shown as *unknown*.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from giornata.wire.workers import (
    FleetView,
    InstanceView,
    ServiceState,
    StoreRoom,
    TemplateCounters,
    WorkerView,
)

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
        self._seen: defaultdict[str, _Seen] = defaultdict(_Seen)

    def observe(self, state: ServiceState, now: float) -> None:
        """Take in one telemetry message, at `now` seconds of any monotonic clock."""
        if state.worker is None:
            return
        seen = self._seen[state.instance]
        seen.totals.append((now, state.worker.steps_total))
        while len(seen.totals) > 2 and seen.totals[1][0] <= now - WINDOW_S:
            seen.totals.popleft()
        seen.samples.extend((now, sample.step_ms) for sample in state.worker.samples if sample.rows)

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


def fleet_view(states: Sequence[ServiceState], rates: StepRates, now: float) -> FleetView:
    """Every live instance and their sums; `rates` was fed their telemetry, by the clock of `now`."""
    instances = [_instance(state, rates, now) for state in states]
    workers = [view.worker for view in instances if view.worker and view.ready and not view.draining]
    queue = next((state.queue for state in states if state.queue is not None and state.active), None)
    paces = [worker.steps_per_s for worker in workers]
    known = [steps for steps in paces if steps is not None]
    return FleetView(
        instances=instances,
        workers=len(workers),
        running_rows=sum(worker.running_rows for worker in workers),
        waiting_rows=sum(worker.waiting_rows for worker in workers),
        free_rows=sum(worker.free_rows for worker in workers),
        queued_jobs=queue.jobs if queue else None,
        queued_rows=queue.rows if queue else None,
        steps_per_s=sum(known) if paces and len(known) == len(paces) else None,
        predicted_wait_s=None if queue is None or queue.wait_ms is None else queue.wait_ms / 1e3,
        templates=_templates(states),
        stores=stores_of(states),
    )


def stores_of(states: Iterable[ServiceState]) -> tuple[StoreRoom, ...] | None:
    """How full the streams are, as the active router tells."""
    return next((state.stores for state in states if state.stores is not None and state.active), None)


def _templates(states: Sequence[ServiceState]) -> TemplateCounters | None:
    told = [state.worker.templates for state in states if state.worker and state.worker.templates]
    if not told:
        return None
    names = TemplateCounters.model_fields
    return TemplateCounters.model_validate({n: sum(getattr(one, n) for one in told) for n in names})


def _instance(state: ServiceState, rates: StepRates, now: float) -> InstanceView:
    told = vars(state) | {
        "models": [card.name for card in state.models],
        "running_rows": 0,
        "waiting_rows": 0,
    }
    if worker := state.worker:
        rows = {"running_rows": len(worker.running), "waiting_rows": len(worker.waiting)}
        told |= rows
        told["worker"] = WorkerView(
            **rows,
            free_rows=max(0, worker.capacity_rows - sum(rows.values())),
            capacity_rows=worker.capacity_rows,
            steps_per_s=rates.steps_per_s(state.instance),
            step_ms=rates.step_ms(state.instance, now),
        )
    return InstanceView.model_validate(told)
