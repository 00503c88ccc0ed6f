"""How ``giornata top`` looks."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from giornata_tools.cli.top.seen import FleetSnapshot, WorkerSnapshot
from giornata_tools.tables import table

UNKNOWN: Final = "?"
STYLES: Final = {"ready": "green", "starting": "yellow", "draining": "yellow"}
WORDS: Final = {"worker", "state"}
COLUMNS: Final = (
    *("worker", "state", "run", "wait", "free", "steps/s", "ms/step"),
    *("tokens", "of", "tokens/s", "memory/s", "disk/s", "first/s", "miss/s"),
    *("memory MB", "disk MB", "LoRA MB"),
)


def screen(top: FleetSnapshot) -> RenderableType:
    """Two lines of sums, then a line for each worker."""
    lines = table(*COLUMNS, numbers=set(COLUMNS) - WORDS)
    for worker in top.workers:
        lines.add_row(worker.name, Text(worker.state, STYLES[worker.state]), *_numbers(worker))
    return Group(Text(_services(top)), Text(_sums(top)), Text(), lines)


def _services(top: FleetSnapshot) -> str:
    return "ready: " + ", ".join(f"{service} {ready}/{all_}" for service, (ready, all_) in top.ready.items())


def _sums(top: FleetSnapshot) -> str:
    queue = "no router is active"
    if top.queued_jobs is not None:
        queue = f"queue: {top.queued_jobs} jobs, {top.queued_rows} pictures; wait: {_rate(top.wait_s)} s"
    running = sum(worker.running_rows for worker in top.workers)
    return (
        f"{queue}; running: {running} pictures, {_rate(top.total('steps_per_s'))} steps/s, "
        f"{_whole(top.total('tokens_per_s'))} tokens/s"
    )


def _numbers(worker: WorkerSnapshot) -> list[str]:
    return [
        *map(str, (worker.running_rows, worker.waiting_rows, worker.free_rows)),
        *map(_rate, (worker.steps_per_s, worker.step_ms)),
        *map(str, (worker.computed_tokens, worker.tokens)),
        _whole(worker.tokens_per_s),
        *map(_rate, worker.hits_per_s.values()),
        *(_mb(worker.tier_bytes.get(tier)) for tier in ("memory", "disk", "device")),
    ]


def _rate(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


def _whole(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}"


def _mb(size_bytes: int | None) -> str:
    return "" if size_bytes is None else f"{size_bytes / 1e6:.1f}"
