"""``giornata doctor``: every check, its verdict and what to do."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import click
from rich.table import Table
from rich.text import Text

from giornata.logs import configure_logs
from giornata_tools import checkout, terminal
from giornata_tools.cli import doctor_checks
from giornata_tools.cli.doctor_checks import CheckStatus, DoctorFinding, fail, worst
from giornata_tools.cli.extras import installed
from giornata_tools.cli.options import door_options, gateway_of, models_option
from giornata_tools.launcher.models import StackModel
from giornata_tools.terminal import show

STYLES: Final = {CheckStatus.OK: "green", CheckStatus.WARN: "yellow", CheckStatus.FAIL: "bold red"}

Check = Callable[[], Awaitable[DoctorFinding]]


@dataclass(frozen=True)
class CheckedSystem:
    """The system that the doctor looks at."""

    root: Path | None
    """The checkout."""
    gateway_url: str
    gateway_named: bool
    """Whether the user has named it; the local one need not run."""
    nats_url: str | None
    blobs_url: str | None
    models: tuple[str, ...]
    """As `giornata up` takes them; none: the built-in one."""
    device_bytes: int | None = None
    """Of a GPU; then nothing is looked at but what the models take of it."""


@click.command()
@door_options
@models_option(
    "Checkpoint to look at, by default that of GIORNATA_MODEL; give it several times to look at several."
)
@click.option(
    "--device",
    "device_bytes",
    callback=lambda _ctx, _option, size: doctor_checks.size_of(size) if size else None,
    metavar="80GB",
    help="Tell only what a model takes of a GPU of this size, and what would fit where it does not.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context, /, *, url: str | None, models: tuple[str, ...], as_json: bool, **named: Any
) -> None:
    """Look at everything that an edit on this machine needs; say what is missing and what to do.

    In a checkout that is the whole system, elsewhere only the way to a gateway.

    Exit status 1 if something essential is missing. Warnings are no failure.
    """
    if not models and (own := os.environ.get("GIORNATA_MODEL")):
        models = (own,)
    if named["device_bytes"] and not models:
        raise click.UsageError("--device needs --model, or GIORNATA_MODEL.")
    around = CheckedSystem(checkout.find(), gateway_of(url), url is not None, models=models, **named)
    ctx.exit(terminal.run(lambda: run(around, as_json=as_json)))


async def run(around: CheckedSystem, *, as_json: bool) -> int:
    """Check everything at once, print, and tell by the exit status."""
    configure_logs("critical", "console", "giornata")  # what servers refuse or fail at is a finding
    findings = await examine(around)
    verdict = worst(findings.values())
    if as_json:
        checks = [{"name": name, **asdict(one)} for name, one in findings.items()]
        click.echo(json.dumps({"verdict": verdict, "checks": checks}, indent=2))
    else:
        show(table(findings), Text(f"\n{summary(findings)}"))
    return 1 if verdict is CheckStatus.FAIL else 0


async def examine(around: CheckedSystem) -> dict[str, DoctorFinding]:
    """Every finding by the name of its check, in the order in which problems are mended.

    Without a checkout nothing can be started here: then what a system needs is not looked at, and a gateway is needed.
    """
    if around.device_bytes is not None:
        names = {each.served_name: each.source for each in map(StackModel.read, around.models)}
        return {f"{name} on a GPU": doctor_checks.device(names[name], around.device_bytes) for name in names}
    needed = around.gateway_named or around.root is None
    serving = asyncio.ensure_future(_guarded(lambda: doctor_checks.gateway(around.gateway_url, named=needed)))
    want = doctor_checks.wanted(around.root) if around.root else {"giornata": installed("giornata") or ""}
    checks: dict[str, Check] = {
        "Python": _threaded(doctor_checks.python),
        "Distributions": _threaded(lambda: doctor_checks.distributions(want)),
        "Packages": _threaded(lambda: doctor_checks.requirements(want)),
        **(_system(around, around.root, serving) if around.root else {}),
        "NATS": lambda: doctor_checks.nats_server(around.nats_url),
        "Blobs": lambda: doctor_checks.blob_store(around.blobs_url),
        "Services": lambda: serving,
    }
    return dict(zip(checks, await asyncio.gather(*map(_guarded, checks.values())), strict=True))


def _system(around: CheckedSystem, root: Path, serving: asyncio.Future[DoctorFinding]) -> dict[str, Check]:
    """Return what the checkout `root` needs of this machine to run everything."""
    place = urlsplit(around.gateway_url)
    number = place.port or (443 if place.scheme == "https" else 80)

    async def port() -> DoctorFinding:
        answered = (await serving).verdict is CheckStatus.OK
        return await asyncio.to_thread(doctor_checks.port, place.hostname or "", number, answered=answered)

    return {
        "torch": _threaded(doctor_checks.torch),
        "nats-server": _threaded(lambda: doctor_checks.nats_program(needed=around.nats_url is None)),
        "valkey-server": _threaded(lambda: doctor_checks.valkey_server(needed=around.blobs_url is None)),
        "Disk": _threaded(lambda: doctor_checks.disk(root)),
        "Memory": _threaded(doctor_checks.memory),
        **_models(around.models),
        f"Port {number}": port,
        "Browser": _threaded(doctor_checks.browser),
    }


def _models(texts: tuple[str, ...]) -> dict[str, Check]:
    """A check for each checkpoint, and one of their names where there are several."""
    if not texts:
        return {"Model": _threaded(lambda: doctor_checks.model(None))}
    models = [StackModel.read(text) for text in texts]
    if len(models) == 1:
        return {"Model": _threaded(partial(doctor_checks.model, models[0].source))}
    return {
        "Models": _threaded(lambda: doctor_checks.names(models)),
        **{
            f"Model {each.served_name}": _threaded(partial(doctor_checks.model, each.source))
            for each in models
        },
    }


def table(findings: Mapping[str, DoctorFinding]) -> Table:
    """A line per finding, and the remedy below it."""
    lines = Table(box=None, show_header=False, pad_edge=False)
    for name, one in findings.items():
        told = Text(one.sentence)
        if one.remedy:
            told.append(f"\n→ {one.remedy}", "italic")
        lines.add_row(Text(one.verdict, STYLES[one.verdict]), Text(name), told)
    return lines


def summary(findings: Mapping[str, DoctorFinding]) -> str:
    """The report in a sentence."""
    missing = [name for name, one in findings.items() if one.verdict is CheckStatus.FAIL]
    if missing:
        return f"To be mended: {', '.join(missing)}."
    warned = ", ".join(name for name, one in findings.items() if one.verdict is CheckStatus.WARN)
    return f"Nothing essential is missing; look at: {warned}." if warned else "Nothing is missing."


async def _guarded(check: Check) -> DoctorFinding:
    """A check that fails itself is a finding, too: the others are told all the same."""
    try:
        return await check()
    except Exception as error:  # noqa: BLE001 - the check's edge: told in the report
        return fail(f"The check itself failed: {type(error).__name__}.", "Please report it.")


def _threaded(check: Callable[[], DoctorFinding]) -> Check:
    return lambda: asyncio.to_thread(check)
