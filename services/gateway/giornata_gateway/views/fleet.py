"""The fleet as ``/v1/fleet`` tells it: every instance, how fast it is, and what they can do together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from giornata.wire.fleet import ControlView, FleetView, InstanceReport, InstanceView, WorkerView
from giornata.wire.queues import StoreRoom
from giornata.wire.workers import ServiceState, TemplateCounters

TOLD: Final = {"service", "ready", "draining", "active", "models"}
"""What a tenant is told of an instance."""


def fleet_view(reports: Sequence[InstanceReport] | None) -> FleetView:
    """Every live instance and their sums; without `reports` no router tells, and nothing is known."""
    instances = list(map(_instance, reports or ()))
    workers = [view.worker for view in instances if view.worker and view.ready and not view.draining]
    states = [report.state for report in reports or ()]
    queues = [state.queue for state in states if state.queue is not None and state.active]
    waits = [queue.wait_ms for queue in queues if queue.wait_ms is not None]
    paces = [worker.steps_per_s for worker in workers]
    known = [steps for steps in paces if steps is not None]
    return FleetView(
        instances=instances,
        router_active=reports is not None,
        workers=len(workers),
        running_rows=sum(worker.running_rows for worker in workers),
        waiting_rows=sum(worker.waiting_rows for worker in workers),
        free_rows=sum(worker.free_rows for worker in workers),
        queued_jobs=sum(queue.jobs for queue in queues) if queues else None,
        queued_rows=sum(queue.rows for queue in queues) if queues else None,
        steps_per_s=sum(known) if paces and len(known) == len(paces) else None,
        predicted_wait_s=min(waits) / 1e3 if waits else None,
        templates=_templates(reports or ()),
        stores=stores_of(states),
    )


def tenant_view(reports: Sequence[InstanceReport] | None, own_rows: int) -> FleetView:
    """What is ready and how long a picture would wait, without names, hosts and the load of others.

    `own_rows` are the tenant's pictures in progress at this gateway.
    """
    whole = fleet_view(reports)
    bare: dict[str, Any] = {"host": "", "version": "", "running_rows": 0, "waiting_rows": 0}
    told = [
        InstanceView(instance=f"{one.service}-{number}", **bare, **one.model_dump(include=TOLD))
        for number, one in enumerate(one for one in whole.instances if one.ready)
    ]
    known = whole.model_dump(include={"router_active", "workers", "predicted_wait_s"})
    return FleetView(instances=told, running_rows=own_rows, waiting_rows=0, **known)


def stores_of(states: Iterable[ServiceState]) -> tuple[StoreRoom, ...] | None:
    """How full the streams are, as the active router tells."""
    told = (state.stores for state in states if state.active)
    rooms = {room.store: room for stores in told for room in stores or ()}
    return tuple(rooms.values()) or None


def _templates(reports: Sequence[InstanceReport]) -> TemplateCounters | None:
    workers = (report.state.worker for report in reports)
    told = [worker.templates for worker in workers if worker and worker.templates]
    if not told:
        return None
    names = TemplateCounters.model_fields
    return TemplateCounters.model_validate({n: sum(getattr(one, n) for one in told) for n in names})


def _instance(report: InstanceReport) -> InstanceView:
    rows = {"running_rows": report.running_rows, "waiting_rows": report.waiting_rows}
    told = vars(report.state) | rows | {"models": [card.name for card in report.state.models]}
    if control := report.state.control:
        told["control"] = ControlView(
            controlnets=[card.name for card in report.state.controlnets],
            open_rows=control.rows,
            free_rows=max(0, control.capacity_rows - control.rows),
        )
    if worker := report.state.worker:
        told["worker"] = WorkerView(
            **rows,
            free_rows=max(0, worker.capacity_rows - sum(rows.values())),
            capacity_rows=worker.capacity_rows,
            steps_per_s=report.steps_per_s,
            step_ms=report.step_ms,
            ranks=worker.ranks,
            adapters=worker.adapters,
            lora_host=worker.lora_host,
        )
    return InstanceView.model_validate(told)
