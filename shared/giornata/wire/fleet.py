"""The fleet as the active router tells it: a summary for every gateway, and a report of each instance on demand."""

from __future__ import annotations

from pydantic import Field

from giornata.wire.adapters import ControlCard
from giornata.wire.loras import HostTier
from giornata.wire.masks import MaskCard
from giornata.wire.models import ModelCard
from giornata.wire.values import WireModel
from giornata.wire.workers import (
    AdapterCounters,
    HostDevice,
    RankState,
    ServiceName,
    ServiceState,
    StoreRoom,
    TemplateCounters,
)


class FleetSummary(WireModel):
    """router → gateways: what an edit can be done with now; told when it changes, and every second."""

    router: str
    """The instance that tells, which leads."""
    ready: dict[ServiceName, int]
    """Ready instances of each service; a service without one is left out. Routers that stand by count, too."""
    gateways: tuple[str, ...] = ()
    """At most two of the ready gateways: enough for each to know whether it is alone."""
    models: tuple[ModelCard, ...] = ()
    """Models that a ready denoiser and a ready prepost serve with the same digest."""
    controlnets: dict[str, tuple[ControlCard, ...]] = Field(default_factory=dict)
    """ControlNets that ready denoisers compute beside a model, by the model's name; one card of each ControlNet's name.
    A model without any is left out."""
    masks: dict[str, MaskCard] = Field(default_factory=dict)
    """What makes masks from words in a ready prepost, by that prepost's model, which is in the subject to ask on."""
    wait_ms: dict[str, float] = Field(default_factory=dict)
    """About how long a picture would wait for a worker, by model; a model whose workers' speed is unknown is left out.
    """
    nearly_full: tuple[str, ...] = ()
    """JetStream's streams that may soon take nothing more."""


class FleetRequest(WireModel):
    """gateway → router: the instances of one page, counted from 0."""

    page: int = 0
    remaining_ms: int


class InstanceReport(WireModel):
    """A router's knowledge of an instance, its rows counted."""

    state: ServiceState
    """Without rows, samples and recordings."""
    running_rows: int = 0
    waiting_rows: int = 0
    steps_per_s: float | None = None
    """Row steps per second over the last seconds; None while it is unknown."""
    step_ms: float | None = None
    """Median time of its recent steps; None without any."""


class InstanceReports(WireModel):
    """The instances of a page."""

    reports: tuple[InstanceReport, ...]


class FleetPage(WireModel):
    """router → gateway."""

    pages: int
    """How many there are."""
    packed: bytes
    """An :class:`InstanceReports` as :mod:`giornata.wire.codec` writes it: many gateways get the same bytes."""


class WorkerView(WireModel):
    """The present work of a denoiser."""

    running_rows: int
    waiting_rows: int
    """Pictures that it has taken and that are not in the batch yet."""
    free_rows: int
    """Pictures that it would take now."""
    capacity_rows: int
    steps_per_s: float | None = None
    """Row steps per second over the last seconds; null while it is unknown."""
    step_ms: float | None = None
    """Median time of its recent steps, each of which advances every running row by one; null without any."""
    ranks: tuple[RankState, ...] = ()
    """Its devices, where it has several: a pool."""
    adapters: AdapterCounters | None = None
    """What its LoRAs have done since its start."""
    lora_host: str | None = None
    """The host tier that it takes LoRAs from."""


class ControlView(WireModel):
    """The present work of a ControlNet service."""

    controlnets: list[str]
    """Names of those that it computes."""
    open_rows: int
    """Pictures whose ControlNets it computes."""
    free_rows: int
    """Pictures that it would take now."""


class InstanceView(WireModel):
    """One instance of a service."""

    service: ServiceName
    instance: str
    host: str
    version: str
    ready: bool
    draining: bool
    active: bool
    """False for a router that stands by."""
    models: list[str]
    running_rows: int
    waiting_rows: int
    worker: WorkerView | None = None
    control: ControlView | None = None
    """What a ControlNet service does; None for other services."""
    host_tier: HostTier | None = None
    """The host tier of a LoRA store that fills one; else None."""
    gpus: tuple[HostDevice, ...] = ()
    """GPUs that it computes on; of a pool those alone that it has claimed, since `ranks` tell the others."""


class FleetView(WireModel):
    """Answer of ``GET /v1/fleet``, and the data of its stream's events, which leave out what is null: unknown."""

    instances: list[InstanceView]
    """For who is told of its own load alone, the ready ones with nothing but their service, a number and models."""
    router_active: bool = True
    """False where no router tells: then nothing is known of the fleet."""
    workers: int
    """Ready denoisers."""
    running_rows: int
    waiting_rows: int
    free_rows: int | None = None
    """Null for who is told of its own load alone."""
    queued_jobs: int | None = None
    """Jobs that are prepared and that no worker has taken yet; null while no router is active."""
    queued_rows: int | None = None
    steps_per_s: float | None = None
    predicted_wait_s: float | None = None
    """Seconds until the denoising of one more picture would begin where it would begin first, as routers predict it."""
    templates: TemplateCounters | None = None
    """What templates have done at all live denoisers, since the start of each."""
    stores: tuple[StoreRoom, ...] | None = None
    """How full the streams are that hold jobs, records and events; null while no router is active."""
