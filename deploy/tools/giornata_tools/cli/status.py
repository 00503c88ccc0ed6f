"""``giornata status`` and ``models``: the fleet and its LoRAs, and what a request for a served model may name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import click
from pydantic import ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from giornata.wire.errors import ErrorBody
from giornata.wire.requests import EditParameters
from giornata.wire.workers import FleetView, InstanceView, RankState, ServiceName, TemplateCounters
from giornata_tools.cli.groups import asks_gateway
from giornata_tools.cli.options import api_key_option, option_name, url_option
from giornata_tools.clients.edits import RequestRefused
from giornata_tools.clients.http import HttpClient
from giornata_tools.terminal import show, table

# ``giornata status --adapters``: where LoRAs are, by host and worker, and why they were loaded.


NONE = "-"
HOST_COUNTS = [
    "MB",
    "of",
    "missing",
    "hits",
    "demand",
    "ahead",
    "plan",
    "waited s",
    "evicted",
    "failed",
    "plans",
]
WORKER_COUNTS = ("MB", "hits", "evicted", "from store", "ahead", "waited s", "failed")


def adapter_table(fleet: FleetView) -> RenderableType:
    """A line per host tier, then a line per worker."""
    return Group(_hosts(fleet), Text(), _workers(fleet))


def _hosts(fleet: FleetView) -> RenderableType:
    lines = table("host", *HOST_COUNTS, numbers=HOST_COUNTS)
    for one in fleet.instances:
        if (tier := one.host_tier) is None:
            continue
        loads = tier.loads
        lines.add_row(
            tier.name,
            _mb(tier.used_bytes),
            _mb(tier.budget_bytes),
            *map(str, (tier.missing, tier.hits, loads.demand, loads.ahead, loads.plan)),
            f"{loads.waited_ms / 1e3:.1f}",
            *map(str, (tier.evicted, tier.failed)),
            f"{tier.plans}" + (f", {tier.plans_ignored} ignored" if tier.plans_ignored else ""),
        )
    return lines if lines.row_count else Text("No LoRA store fills a host tier.")


def _workers(fleet: FleetView) -> RenderableType:
    lines = table("worker", "host", "tier", *WORKER_COUNTS, numbers=WORKER_COUNTS)
    for one in fleet.instances:
        for row in _rows(one):
            lines.add_row(*row)
    return lines if lines.row_count else Text("No worker tells of LoRAs.")


def _rows(one: InstanceView) -> list[tuple[str, ...]]:
    """A worker's line of each tier; what belongs to the worker stands in the first."""
    if one.worker is None or (counts := one.worker.adapters) is None:
        return []
    asked = map(str, (counts.misses, counts.prefetched))
    loads = (*asked, f"{counts.waited_ms / 1e3:.1f}", str(counts.failed))
    tiers = (
        ("device", counts.device_bytes, counts.hits_device, counts.evicted_device),
        ("memory", counts.memory_bytes, counts.hits_memory, counts.evicted_memory),
        ("disk", counts.disk_bytes, counts.hits_disk, counts.evicted_disk),
    )
    rows = []
    for place, (tier, size_bytes, hits, evicted) in enumerate(tiers):
        name = (one.instance, one.worker.lora_host or NONE) if place == 0 else ("", "")
        told = loads if place == 0 else ("",) * len(loads)
        rows.append((*name, tier, _mb(size_bytes), str(hits), str(evicted), *told))
    return rows


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.0f}"


# ``giornata status``: the fleet as a table or as JSON, once or live.


PATH: Final = "/v1/fleet"
UNKNOWN: Final = "?"
STYLES: Final = {"ready": "green", "starting": "yellow", "draining": "yellow", "standby": "dim"}


@click.command()
@url_option
@api_key_option
@click.option("--adapters", is_flag=True, help="Show where LoRAs are, and why they were loaded.")
@click.option("--watch", is_flag=True, help="Go on until Ctrl-C.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print what the gateway tells; with --watch a line each time."
)
@asks_gateway
async def status(gateway: HttpClient, *, adapters: bool, watch: bool, as_json: bool) -> int:
    """Show every instance of every service: its state, its pictures in progress, its pace; and the queue.

    A question mark is what is not known yet, such as the pace of a worker that has computed nothing lately.
    """
    drawn = adapter_table if adapters else fleet_table
    if watch:
        return await _watch(gateway, drawn, as_json=as_json)
    told = await gateway.read(PATH)
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        show(drawn(_fleet(told)))
    return 0


async def _watch(door: HttpClient, drawn: Callable[[FleetView], RenderableType], *, as_json: bool) -> int:
    """Print until the gateway ends the stream; Ctrl-C is how watching ends, and so no failure."""
    try:
        if as_json:
            async for told in door.follow(PATH):
                click.echo(json.dumps(told))
        else:
            with Live(console=Console(), auto_refresh=False) as live:
                async for told in door.follow(PATH):
                    live.update(drawn(_fleet(told)), refresh=True)
    except asyncio.CancelledError:
        return 0
    click.echo("The gateway ended the stream; it is shutting down.", err=True)
    return 1


def _fleet(told: dict[str, Any]) -> FleetView:
    try:
        return FleetView.model_validate(told)
    except ValidationError as error:
        message = f"The gateway tells of its fleet in another form than this version reads: {error}"
        raise RequestRefused(ErrorBody(code="schema_mismatch", message=message)) from error


def fleet_table(fleet: FleetView) -> RenderableType:
    """A line per instance, and the sums below; rows are pictures in progress, at ControlNet services those open."""
    counts = ("run", "wait", "free", "steps/s", "ms/step")
    lines = table("service", "instance", "state", *counts, "models", numbers=counts, prose={"models"})
    for one in fleet.instances:
        numbers = [""] * 5
        if worker := one.worker:
            rows = (worker.running_rows, worker.waiting_rows, worker.free_rows)
            numbers = [*map(str, rows), _number(worker.steps_per_s), _number(worker.step_ms)]
        names = one.models
        if control := one.control:
            names, numbers = control.controlnets, [str(control.open_rows), "", str(control.free_rows), "", ""]
        state = _state_of(one)
        lines.add_row(one.service, one.instance, Text(state, STYLES[state]), *numbers, ", ".join(names))
    return Group(lines, Text(), Text(sums(fleet)))


def sums(fleet: FleetView) -> str:
    """The whole fleet in two lines; more for models that are not served, templates, devices and full streams."""
    if not fleet.router_active:
        return "No router is active; nothing is known of the fleet."
    if not fleet.instances:
        return "No service tells of itself."
    jobs = UNKNOWN if fleet.queued_jobs is None else str(fleet.queued_jobs)
    rows = "" if fleet.queued_rows is None else f" ({fleet.queued_rows} pictures)"
    told = (
        f"pictures: {fleet.running_rows} running, {fleet.waiting_rows} waiting at workers; "
        f"free places: {UNKNOWN if fleet.free_rows is None else fleet.free_rows}\n"
        f"queued jobs: {jobs}{rows}; steps/s: {_number(fleet.steps_per_s)}; "
        f"predicted wait: {_number(fleet.predicted_wait_s)} s"
    )
    for model, lacking in _unserved(fleet):
        told += f"\nnot served: {model}, no {lacking} with it takes work"
    if fleet.templates:
        told += f"\n{_templates_line(fleet.templates)}"
    for one in fleet.instances:
        if one.worker and one.worker.ranks:
            told += f"\npool {one.instance}: {', '.join(map(_rank, one.worker.ranks))}"
        if one.gpus:
            how = "claimed" if all(gpu.claimed for gpu in one.gpus) else "used"
            told += f"\n{how} by {one.instance}: {', '.join(f'{gpu.device} {gpu.id}' for gpu in one.gpus)}"
    for room in fleet.stores or ():
        if room.nearly_full:
            told += f"\nnearly full: {room.store}, {room.used_bytes >> 20} of {room.limit_bytes >> 20} MiB"
    return told


def _rank(rank: RankState) -> str:
    doing = "busy" if rank.busy else str(rank.phase)
    return f"{rank.device} {doing}" + (f" (started {rank.starts} times)" if rank.starts > 1 else "")


def _templates_line(told: TemplateCounters) -> str:
    edits = told.hits_memory + told.hits_disk + told.hits_first + told.misses
    return (
        f"edits that could reuse: {edits}, {told.hits_memory} from memory, {told.hits_disk} from disk, "
        f"{told.hits_first} from an earlier edit; "
        f"templates: {told.memory_bytes / 2**20:.0f} MiB in memory, {told.disk_bytes / 2**20:.0f} MiB on disk"
    )


def _unserved(fleet: FleetView) -> list[tuple[str, ServiceName]]:
    """Models that an instance has and no request can name, each with the service that lacks it."""
    having = {
        service: {
            model
            for one in fleet.instances
            if one.service == service and one.ready and not one.draining
            for model in one.models
        }
        for service in (ServiceName.DENOISER, ServiceName.PREPOST)
    }
    known = {model for one in fleet.instances for model in one.models}
    return [(model, service) for model in sorted(known) for service in having if model not in having[service]]


def _state_of(instance: InstanceView) -> str:
    if instance.draining:
        return "draining"
    if not instance.ready:
        return "starting"
    return "ready" if instance.active else "standby"


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f}"


# ``giornata models``: which models a gateway serves, and what a request for one may name.


FILES: Final = {"image": "IN", "mask": "--mask"}
"""Fields that are no parameters, as the command line has them."""


@click.command()
@click.argument("name", required=False)
@url_option
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="Print what the gateway tells.")
@asks_gateway
async def models(gateway: HttpClient, name: str | None, *, as_json: bool) -> None:
    """List the models that are served, or the options of one.

    Of the model NAME each option has its default by task, and its samplers and ControlNets are named.
    """
    told = (await gateway.read("/v1/models"))["data"]
    chosen = told if name is None else [_named(told, name)]
    if as_json:
        click.echo(json.dumps(chosen, indent=2))
    else:
        show(models_table(chosen) if name is None else model_table(chosen[0]))


def _named(told: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    for model in told:
        if model["id"] == name:
            return model
    served = ", ".join(model["id"] for model in told) or "none"
    raise RequestRefused(
        ErrorBody(code="model_not_found", message="No such model is served.", received=name, accepted=served)
    )


def models_table(told: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line per model of ``GET /v1/models``."""
    if not told:
        return Text("No model is served.")
    lines = table("model", "family", "tasks", "guidance", "native size", "sides")
    for model in told:
        side, tasks = model["native_size"], ", ".join(model["tasks"])
        sizes = (f"{side}x{side}", f"multiples of {model['size_multiple']}")
        lines.add_row(model["id"], model["family"], tasks, model["guidance"], *sizes)
    return lines


def model_table(model: Mapping[str, Any]) -> RenderableType:
    """A line per option that a model of ``GET /v1/models`` takes for some task: its default by task."""
    tasks, fields = model["tasks"], model["fields"]
    lines = table("option", *tasks)
    for name in dict.fromkeys(name for task in tasks for name in fields[task]):
        if name in EditParameters.model_fields or name in FILES:
            option = FILES.get(name) or option_name(name)
            lines.add_row(option, *(_default(model, task, name) for task in tasks))
    named = [Text(f"samplers: {', '.join(model['samplers'])}")]
    if model["controlnets"]:
        named.append(Text(f"ControlNets: {', '.join(map(_controlnet, model['controlnets']))}"))
    return Group(models_table([model]), Text(), lines, Text(), *named)


def _controlnet(net: Mapping[str, Any]) -> str:
    return f"{net['name']} (mode 0 to {net['modes'] - 1})" if net["modes"] else str(net["name"])


def _default(model: Mapping[str, Any], task: str, name: str) -> str:
    """The default as a cell; empty where an option has none, and may be left out."""
    if name not in model["fields"][task]:
        return "-"
    field, default = EditParameters.model_fields.get(name), model["defaults"][task].get(name)
    if default is None and field is not None:
        default = "required" if field.is_required() else field.get_default(call_default_factory=True)
    return "" if default is None or default == () else str(default)
