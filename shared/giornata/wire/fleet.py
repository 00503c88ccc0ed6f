"""The fleet as ``GET /v1/fleet`` tells it: what gateways answer and the command line reads."""

from __future__ import annotations

from giornata.wire.values import Wire
from giornata.wire.workers import ServiceName, TemplateCounters


class WorkerView(Wire):
    """What a denoiser does."""

    running_rows: int
    """Pictures in its batch."""
    waiting_rows: int
    """Pictures that it has taken and that are not in the batch yet."""
    free_rows: int
    """Pictures that it would take now."""
    capacity_rows: int
    steps_per_s: float | None = None
    """Row steps per second over the last seconds; null while it is unknown."""
    step_ms: float | None = None
    """Median time of its recent steps, each of which advances every running row by one; null without any."""


class InstanceView(Wire):
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
    """A denoiser's own part."""


class FleetView(Wire):
    """Answer of ``GET /v1/fleet``, and the data of each event of its stream, which leaves out what is null here.

    Null is: unknown.
    """

    instances: list[InstanceView]
    workers: int
    """Ready denoisers."""
    running_rows: int
    waiting_rows: int
    """Pictures that a worker has taken and that are not in its batch yet."""
    free_rows: int
    queued_jobs: int | None = None
    """Jobs that are prepared and that no worker has taken yet; null while no router is active."""
    queued_rows: int | None = None
    """Their pictures."""
    steps_per_s: float | None = None
    """Row steps per second over the last seconds."""
    predicted_wait_s: float | None = None
    """Seconds until the denoising of one more picture would begin, as the router predicts it."""
    templates: TemplateCounters | None = None
    """What templates have done at all live denoisers, since the start of each."""
