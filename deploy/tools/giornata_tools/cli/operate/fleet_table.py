"""What ``GET /v1/fleet`` tells, as a value and as a table. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

UNKNOWN = "?"


class _Told(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Worker(_Told):
    """What a denoiser does; None is unknown."""

    running_rows: int
    waiting_rows: int
    free_rows: int
    steps_per_s: float | None = None
    step_ms: float | None = None


class Instance(_Told):
    """One instance of a service."""

    service: str
    instance: str
    version: str
    ready: bool
    draining: bool
    active: bool
    models: tuple[str, ...] = ()
    worker: Worker | None = None

    @property
    def state(self) -> str:
        """In a word."""
        if self.draining:
            return "draining"
        if not self.ready:
            return "starting"
        return "ready" if self.active else "standby"


class Templates(_Told):
    """What templates have done at all denoisers."""

    hits_memory: int
    hits_disk: int
    misses: int
    memory_bytes: int
    disk_bytes: int

    @property
    def line(self) -> str:
        """In a sentence."""
        edits = self.hits_memory + self.hits_disk + self.misses
        return (
            f"edits that could reuse: {edits}, {self.hits_memory} from memory, {self.hits_disk} from disk; "
            f"templates: {self.memory_bytes / 2**20:.0f} MiB in memory, {self.disk_bytes / 2**20:.0f} MiB on disk"
        )


class FleetStatus(_Told):
    """Every live instance and their sums; None is unknown."""

    instances: tuple[Instance, ...]
    running_rows: int
    waiting_rows: int
    free_rows: int
    queued_jobs: int | None = None
    queued_rows: int | None = None
    steps_per_s: float | None = None
    predicted_wait_s: float | None = None
    templates: Templates | None = None


STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "standby": "dim"}


def fleet_table(fleet: FleetStatus) -> RenderableType:
    """A line per instance, and the sums below; rows are pictures in progress."""
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for name in ("service", "instance", "state"):
        table.add_column(name, no_wrap=True, overflow="fold")
    for name in ("run", "wait", "free", "steps/s", "ms/step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("models", overflow="fold")
    for one in fleet.instances:
        worker = one.worker
        numbers = (
            ("", "", "", "", "")
            if worker is None
            else (
                str(worker.running_rows),
                str(worker.waiting_rows),
                str(worker.free_rows),
                number(worker.steps_per_s),
                number(worker.step_ms),
            )
        )
        state = Text(one.state, STYLES[one.state])
        table.add_row(one.service, one.instance, state, *numbers, ", ".join(one.models))
    return Group(table, Text(), Text(sums(fleet)))


def sums(fleet: FleetStatus) -> str:
    """The whole fleet in two lines, or three where denoisers tell of templates."""
    if not fleet.instances:
        return "No service tells of itself."
    jobs = UNKNOWN if fleet.queued_jobs is None else str(fleet.queued_jobs)
    rows = "" if fleet.queued_rows is None else f" ({fleet.queued_rows} pictures)"
    return (
        f"pictures: {fleet.running_rows} running, {fleet.waiting_rows} waiting at workers; "
        f"free places: {fleet.free_rows}\n"
        f"queued jobs: {jobs}{rows}; steps/s: {number(fleet.steps_per_s)}; "
        f"predicted wait: {number(fleet.predicted_wait_s)} s"
        + (f"\n{fleet.templates.line}" if fleet.templates else "")
    )


def number(value: float | None) -> str:
    """One decimal, or a question mark for what is unknown."""
    return UNKNOWN if value is None else f"{value:.1f}"
