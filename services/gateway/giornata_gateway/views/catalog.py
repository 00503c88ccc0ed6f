"""Views of what the fleet serves, and of every instance of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

from giornata.wire.adapters import ControlCard
from giornata.wire.messages import MaskCard
from giornata.wire.models import Guidance, ModelCard, Task
from giornata.wire.resolution import Default, defaults_of, fields_of
from giornata.wire.workers import (
    ControlView,
    FleetView,
    InstanceReport,
    InstanceView,
    ServiceName,
    ServiceState,
    StoreRoom,
    TemplateCounters,
    WorkerView,
)
from giornata_gateway.views.jobs import View


class ControlNetView(View):
    """A ControlNet that is served with a model."""

    name: str
    """What `model` of `controlnets` names it by."""
    modes: int
    """Kinds of control images that a union takes, named by `mode` from 0; others have 0, and no `mode`."""


class ModelView(View):
    """One served model, in the form of OpenAI's list."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "giornata"
    aliases: list[str]
    """Other names that requests may call it by."""
    family: str
    digest: str
    default_steps: int
    """The default for edits, as are strength and guidance scale; `defaults` tells them by task."""
    default_strength: float
    default_guidance_scale: float | None
    """Null where the model takes no guidance."""
    takes_guidance: bool
    """Whether `guidance_scale` is accepted."""
    guidance: Guidance
    """What `guidance_scale` means."""
    takes_negative_prompt: bool
    """Whether `negative_prompt` is accepted."""
    takes_true_cfg: bool
    """Whether `true_cfg_scale` is, which a negative prompt then needs above 1."""
    default_true_cfg_scale: float
    """The default `true_cfg_scale` of requests with a negative prompt."""
    samplers: list[str]
    """What `sampler` may be."""
    default_sampler: str
    step_caches: list[str]
    """What `step_cache` may be beside `off`."""
    tasks: list[Task]
    """What it is served for; `edit` alone where it needs a picture."""
    fields: dict[Task, list[str]]
    """What a request for each task may name, beside the fields that say how its answer travels."""
    defaults: dict[Task, dict[str, Default]]
    """By task, what fields stand for that a request leaves out, where models differ in it."""
    generation_guidance_scale: float | None
    """Default `guidance_scale` of generations; null where it takes none, or generates nothing."""
    max_prompt_tokens: int | None
    """How many tokens of a prompt are read; null where all are."""
    max_references: int
    """How many pictures `reference` may bring."""
    controlnets: list[ControlNetView]
    """What `controlnets` may name."""
    masks: str | None
    """What makes the masks of `mask_prompt`; null where nothing does."""
    size_multiple: int
    """Sides of generated pictures are multiples of so many pixels."""
    native_size: int
    """Pixels per side of the square pictures that it was trained on; `padding_mask_crop` edits at about this size."""


class ModelList(View):
    """Answer of ``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelView]


class HealthView(View):
    """Answer of ``GET /healthz``."""

    healthy: bool
    nats: str
    """`ok`, or what is wrong."""
    blobs: str
    """`ok`, or what is wrong."""


class ReadyView(View):
    """Answer of ``GET /readyz``."""

    ready: bool
    missing: list[str]
    """Services without a ready instance; `gateway` while this one is shutting down."""
    models: list[str]
    nearly_full: list[str]
    """JetStream streams that hold four fifths of what they may."""
    storage_full: dict[str, str]
    """Stores that take no write now, `blobs` or a JetStream stream, with what is wrong."""


def model_list(
    cards: Mapping[str, ModelCard],
    controlnets: Mapping[str, Sequence[ControlCard]],
    masks: Mapping[str, MaskCard] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> ModelList:
    """Served models, by name, each with its aliases, its ControlNets and what makes its masks from words."""
    led = {alias: real for alias, real in aliases.items() if alias not in cards}
    named = {name: sorted(alias for alias, real in led.items() if real == name) for name in cards}
    return ModelList(
        data=[
            _model(card, named[name], controlnets.get(name, ()), mask_card(masks, name))
            for name, card in sorted(cards.items())
        ]
    )


def mask_card(masks: Mapping[str, MaskCard], model: str | None) -> MaskCard | None:
    """What makes masks from words for edits with `model`, None for no model's: its own prepost's, else the first one.

    `masks` are by the model of the prepost that has it. A mask does not depend on the model that paints in it.
    """
    first = min(masks, default=None)
    return masks.get(model or "", None if first is None else masks[first])


def _model(
    card: ModelCard, aliases: Sequence[str], controlnets: Sequence[ControlCard], masks: MaskCard | None
) -> ModelView:
    told: dict[str, object] = {
        "id": card.name,
        "aliases": aliases,
        "size_multiple": card.pixel_multiple,
        "fields": fields_of(card, controlled=bool(controlnets), masked=masks is not None),
        "masks": None if masks is None else masks.name,
        "controlnets": [ControlNetView(name=net.name, modes=net.modes) for net in controlnets],
        "defaults": {task: defaults_of(card, task) for task in card.tasks},
        "guidance": card.guidance,
        "takes_negative_prompt": card.takes_negative_prompt,
    }
    if not card.takes_guidance:
        told |= {"default_guidance_scale": None, "generation_guidance_scale": None}
    return ModelView.model_validate(vars(card) | told)


def ready_view(
    cards: Mapping[str, ModelCard],
    missing: Iterable[ServiceName],
    nearly_full: Iterable[str] = (),
    storage_full: Mapping[str, str] = MappingProxyType({}),
    *,
    draining: bool,
) -> ReadyView:
    """Return whether an edit would be carried out now, what it lacks, and which stores are nearly or wholly full."""
    lacking = [*missing, *([ServiceName.GATEWAY] if draining else [])]
    if not cards and not lacking:
        lacking = [ServiceName.DENOISER]  # all are ready, but no denoiser shares a model with a prepost
    return ReadyView(
        ready=not lacking and not storage_full,
        missing=[str(name) for name in lacking],
        models=sorted(cards),
        nearly_full=list(nearly_full),
        storage_full=dict(storage_full),
    )


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
    counted = [state.worker.templates for state in states if state.worker and state.worker.templates]
    sums = {name: sum(getattr(one, name) for one in counted) for name in TemplateCounters.model_fields}
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
        templates=TemplateCounters.model_validate(sums) if counted else None,
        stores=stores_of(states),
    )


def tenant_view(reports: Sequence[InstanceReport] | None, own_rows: int) -> FleetView:
    """Return what is ready and how long a picture would wait, without names, hosts and the load of others.

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
    """Return how full the streams are, as the active router tells."""
    told = (state.stores for state in states if state.active)
    rooms = {room.store: room for stores in told for room in stores or ()}
    return tuple(rooms.values()) or None


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
        free = {"free_rows": max(0, worker.capacity_rows - sum(rows.values()))}
        told["worker"] = WorkerView.model_validate(vars(worker) | vars(report) | free)
    return InstanceView.model_validate(told)
