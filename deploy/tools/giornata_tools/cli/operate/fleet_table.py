"""What ``GET /v1/fleet`` tells, as a table. Pure."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from giornata.wire.workers import FleetView, InstanceView, TemplateCounters

UNKNOWN = "?"
STYLES = {"ready": "green", "starting": "yellow", "draining": "yellow", "standby": "dim"}


def fleet_table(fleet: FleetView) -> RenderableType:
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
        state = Text(state_of(one), STYLES[state_of(one)])
        table.add_row(one.service, one.instance, state, *numbers, ", ".join(one.models))
    return Group(table, Text(), Text(sums(fleet)))


def sums(fleet: FleetView) -> str:
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
        + (f"\n{templates_line(fleet.templates)}" if fleet.templates else "")
    )


def state_of(instance: InstanceView) -> str:
    """The state of an instance in a word."""
    if instance.draining:
        return "draining"
    if not instance.ready:
        return "starting"
    return "ready" if instance.active else "standby"


def templates_line(told: TemplateCounters) -> str:
    """What templates have done at all denoisers, in a sentence."""
    edits = told.hits_memory + told.hits_disk + told.misses
    return (
        f"edits that could reuse: {edits}, {told.hits_memory} from memory, {told.hits_disk} from disk; "
        f"templates: {told.memory_bytes / 2**20:.0f} MiB in memory, {told.disk_bytes / 2**20:.0f} MiB on disk"
    )


def number(value: float | None) -> str:
    """One decimal, or a question mark for what is unknown."""
    return UNKNOWN if value is None else f"{value:.1f}"
