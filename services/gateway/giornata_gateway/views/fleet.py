"""The fleet as ``/v1/fleet`` tells it: every instance, and what they can do together."""

from __future__ import annotations

from collections.abc import Sequence

from giornata.wire.workers import FleetView, InstanceView, ServiceState, TemplateCounters, WorkerView
from giornata_gateway.views.rates import StepRates

EVENT = "fleet"
"""Type of the events of the live stream."""


def fleet_view(states: Sequence[ServiceState], rates: StepRates, now: float) -> FleetView:
    """Every live instance and their sums.

    Args:
        states: telemetry of the live instances.
        rates: was fed their telemetry.
        now: seconds, of the clock that `rates` was fed with.
    """
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
    )


def _templates(states: Sequence[ServiceState]) -> TemplateCounters | None:
    told = [state.worker.templates for state in states if state.worker and state.worker.templates]
    if not told:
        return None
    names = TemplateCounters.model_fields
    return TemplateCounters.model_validate({n: sum(getattr(one, n) for one in told) for n in names})


def _instance(state: ServiceState, rates: StepRates, now: float) -> InstanceView:
    worker = state.worker
    running, waiting = (len(worker.running), len(worker.waiting)) if worker else (0, 0)
    return InstanceView(
        service=state.service,
        instance=state.instance,
        host=state.host,
        version=state.version,
        ready=state.ready,
        draining=state.draining,
        active=state.active,
        models=[card.name for card in state.models],
        running_rows=running,
        waiting_rows=waiting,
        worker=WorkerView(
            running_rows=running,
            waiting_rows=waiting,
            free_rows=max(0, worker.capacity_rows - running - waiting),
            capacity_rows=worker.capacity_rows,
            steps_per_s=rates.steps_per_s(state.instance),
            step_ms=rates.step_ms(state.instance, now),
        )
        if worker
        else None,
    )
