"""``giornata top``: it listens to telemetry over NATS, and asks no service anything."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Final

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from giornata.bus import bus
from giornata.logs import configure_logs
from giornata.wire import subjects
from giornata.wire.errors import GiornataError
from giornata.wire.permissions import NatsRole
from giornata.wire.workers import ServiceState, TelemetryReader
from giornata_tools import terminal
from giornata_tools.cli.options import connection_failure, login_of, user_options
from giornata_tools.cli.top.aggregation import FleetSnapshot, TelemetryAggregator, WorkerSnapshot
from giornata_tools.terminal import show, table

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
@click.pass_context
def top(
    ctx: click.Context, /, url: str | None, password_file: Path | None, interval: float, **how: bool
) -> None:
    """Watch the workers: rows, tokens, tiers and the queue, with rates of the last five seconds.

    A question mark is what is not known yet. `tokens` are image tokens that the next step computes, `of` those of the
    running pictures; memory/s, disk/s, first/s and miss/s are edits by where their template was found.
    """
    servers, password, _ = login_of(url, password_file, NatsRole.OBSERVER)
    ctx.exit(terminal.run(lambda: run(servers, password, interval, **how)))


async def run(url: str, password_file: Path | None, interval_s: float, *, once: bool, as_json: bool) -> int:
    """Listen and print; the exit status. Ctrl-C is how watching ends, and so no failure."""
    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    seen = TelemetryAggregator()

    def hear(state: ServiceState) -> None:
        seen.hear(state, time.monotonic())

    connecting = bus.connect(url, "giornata-top", user=NatsRole.OBSERVER, password_file=password_file)
    try:
        async with (
            connecting as connected,
            connected.listen(subjects.ALL_TELEMETRY, ServiceState, hear, TelemetryReader().read),
        ):
            if once:
                await asyncio.sleep(interval_s)  # rates need time
                return _shown(seen.top(time.monotonic()), as_json=as_json)
            await _watch(seen, interval_s, as_json=as_json)
    except GiornataError as error:
        click.echo(f"Error: {connection_failure(error, url)}", err=True)
        return 1
    except asyncio.CancelledError:
        if once:
            raise
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
