"""``giornata top``: it listens to telemetry over NATS, and asks no service anything."""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from giornata.bus.bus import Bus
from giornata.fleet import Fleet
from giornata.wire import subjects
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState, TelemetryReader, WorkerState
from giornata_tools.cli.groups import asks_nats
from giornata_tools.cli.options import user_options
from giornata_tools.terminal import show, table

WINDOW_S: Final = 5.0
"""Rates are those of the last seconds, so many."""
SHORTEST_S: Final = 0.2
"""Over less than this, a count says nothing."""


class CounterWindow:
    """Counters of one instance over the last :data:`WINDOW_S`."""

    def __init__(self) -> None:
        self._told: deque[tuple[float, Mapping[str, float]]] = deque()

    def add(self, now: float, counters: Mapping[str, float]) -> None:
        """Return what the counters are now."""
        self._told.append((now, counters))
        while len(self._told) > 2 and self._told[1][0] <= now - WINDOW_S:
            self._told.popleft()

    def per_s(self, name: str) -> float | None:
        """Return how fast a counter grows; None while that is unknown."""
        if not self._told:
            return None
        (first_s, first), (last_s, last) = self._told[0], self._told[-1]
        if name not in first or name not in last or last_s - first_s < SHORTEST_S:
            return None
        return (last[name] - first[name]) / (last_s - first_s)


@dataclass(frozen=True)
class WorkerSnapshot:
    """A denoiser now. Rates are a second's, None while they are unknown."""

    name: str
    state: str
    running_rows: int
    waiting_rows: int
    free_rows: int
    computed_tokens: int
    """Image tokens that the running rows' next steps compute."""
    tokens: int
    """Image tokens of the running rows."""
    steps_per_s: float | None
    """Row steps."""
    step_ms: float | None
    tokens_per_s: float | None
    """Image tokens computed."""
    hits_per_s: Mapping[str, float | None]
    """Edits that could take from a template, by the tier that had it; ``none`` is a miss."""
    tier_bytes: Mapping[str, int]
    """Templates in ``memory`` and on ``disk``; LoRAs on the ``device``."""


@dataclass(frozen=True)
class FleetSnapshot:
    """The fleet now."""

    ready: Mapping[str, tuple[int, int]]
    """Ready instances, and all, by service."""
    queued_jobs: int | None
    """Jobs that no worker has taken; None where no router is active."""
    queued_rows: int | None
    wait_s: float | None
    """About how long one more picture would wait; None while it is unknown."""
    workers: tuple[WorkerSnapshot, ...] = field(default=())

    def total(self, name: str) -> float | None:
        """The sum of a rate over all workers; None where one of them is unknown."""
        rates = [getattr(worker, name) for worker in self.workers]
        return None if None in rates else float(sum(rates))


class TelemetryAggregator:
    """Takes in telemetry and tells what it comes to."""

    def __init__(self) -> None:
        self._fleet = Fleet()
        self._counts: dict[str, CounterWindow] = {}
        self._steps: dict[str, deque[tuple[float, int, int, float]]] = {}
        """By worker: when it was told, rows, tokens and milliseconds of each step."""

    def hear(self, state: ServiceState, now: float) -> None:
        """One message."""
        self._fleet.observe(state, now)
        if state.worker is None:
            return
        self._counts.setdefault(state.instance, CounterWindow()).add(now, _counters(state.worker))
        steps = self._steps.setdefault(state.instance, deque())
        samples = (sample for sample in state.worker.samples if sample.rows)
        steps.extend((now, sample.rows, sample.image_tokens, sample.step_ms) for sample in samples)
        while steps and steps[0][0] <= now - WINDOW_S:
            steps.popleft()

    def top(self, now: float) -> FleetSnapshot:
        """The fleet as it is known at `now`; instances that fell silent are left out."""
        for gone in self._fleet.expire(now):
            self._counts.pop(gone.instance, None)
            self._steps.pop(gone.instance, None)
        states = self._fleet.all()
        queues = [state.queue for state in states if state.queue is not None and state.active]
        waits = [queue.wait_ms for queue in queues if queue.wait_ms is not None]
        return FleetSnapshot(
            ready=_ready(states),
            queued_jobs=sum(queue.jobs for queue in queues) if queues else None,
            queued_rows=sum(queue.rows for queue in queues) if queues else None,
            wait_s=min(waits) / 1e3 if waits else None,
            workers=tuple(self._worker(state, state.worker) for state in states if state.worker),
        )

    def _worker(self, state: ServiceState, worker: WorkerState) -> WorkerSnapshot:
        counts, steps = self._counts[state.instance], self._steps[state.instance]
        steps_per_s, rows = counts.per_s("steps"), sum(step[1] for step in steps)
        each = sum(step[2] for step in steps) / rows if rows else None
        held = len(worker.running) + len(worker.waiting)
        idle = steps_per_s == 0
        return WorkerSnapshot(
            name=state.instance,
            state=_state(state),
            running_rows=len(worker.running),
            waiting_rows=len(worker.waiting),
            free_rows=max(0, worker.capacity_rows - held),
            computed_tokens=sum(
                row.tokens if row.computed_tokens is None else row.computed_tokens for row in worker.running
            ),
            tokens=sum(row.tokens for row in worker.running),
            steps_per_s=steps_per_s,
            step_ms=median(step[3] for step in steps) if steps else None,
            tokens_per_s=0.0 if idle else None if each is None or steps_per_s is None else each * steps_per_s,
            hits_per_s={tier: counts.per_s(tier) for tier in _HITS},
            tier_bytes=_sizes(worker),
        )


_HITS: Final = ("memory", "disk", "first", "none")


def _counters(worker: WorkerState) -> dict[str, float]:
    told = worker.templates
    hits = (told.hits_memory, told.hits_disk, told.hits_first, told.misses) if told else ()
    return {"steps": float(worker.steps_total), **dict(zip(_HITS, map(float, hits), strict=False))}


def _sizes(worker: WorkerState) -> dict[str, int]:
    templates, adapters = worker.templates, worker.adapters
    sizes = {"memory": templates.memory_bytes, "disk": templates.disk_bytes} if templates else {}
    return sizes | ({"device": adapters.device_bytes} if adapters else {})


def _ready(states: Iterable[ServiceState]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for service in ServiceName:
        of = [state for state in states if state.service is service]
        if of:
            found[service.value] = (sum(state.ready and not state.draining for state in of), len(of))
    return found


def _state(state: ServiceState) -> str:
    if state.draining:
        return "draining"
    return "ready" if state.ready else "starting"


# How ``giornata top`` looks.


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


# The command: it listens to telemetry over NATS, and asks no service anything.


@click.command()
@user_options(NatsRole.OBSERVER, "that carry the telemetry")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.5, max=60),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="From one update to the next; with --once how long it listens.",
)
@click.option("--once", is_flag=True, help="Print once and end; exit status 1 where no service is heard.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each update.")
@asks_nats(NatsRole.OBSERVER)
async def top(connection: Bus, *, interval: float, once: bool, as_json: bool) -> int:
    """Watch the workers: rows, tokens, tiers and the queue, with rates of the last five seconds.

    A question mark is what is not known yet. `tokens` are image tokens that the next step computes, `of` those of the
    running pictures; memory/s, disk/s, first/s and miss/s are edits by where their template was found.
    """
    seen = TelemetryAggregator()

    def hear(state: ServiceState) -> None:
        seen.hear(state, time.monotonic())

    async with connection.listen(subjects.ALL_TELEMETRY, ServiceState, hear, TelemetryReader().read):
        if once:
            await asyncio.sleep(interval)  # rates need time
            return _shown(seen.top(time.monotonic()), as_json=as_json)
        with suppress(asyncio.CancelledError):  # Ctrl-C is how watching ends, and so no failure
            await _watch(seen, interval, as_json=as_json)
    return 0


async def _watch(seen: TelemetryAggregator, interval_s: float, *, as_json: bool) -> None:
    """Until it is cancelled."""
    with Live(console=Console(stderr=as_json), auto_refresh=False, screen=False) as live:
        while True:
            await asyncio.sleep(interval_s)  # the rate of updates, not a poll
            now = seen.top(time.monotonic())
            if as_json:
                click.echo(_line(now))
            else:
                live.update(screen(now), refresh=True)


def _shown(top: FleetSnapshot, *, as_json: bool) -> int:
    if as_json:
        click.echo(_line(top))
    elif top.ready:
        show(screen(top))
    else:
        click.echo("No service tells of itself.", err=True)
    return 0 if top.ready else 1


def _line(top: FleetSnapshot) -> str:
    return json.dumps(asdict(top))
