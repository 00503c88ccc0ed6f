"""``giornata doctor``: every check, its verdict and what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from giornata import runtime
from giornata_tools import checkout, interrupts
from giornata_tools.cli.connecting import gateway_of, nats_option, redis_option, url_option
from giornata_tools.cli.doctor import accelerator, machine, packages, servers
from giornata_tools.cli.doctor.finding import Finding, Verdict, fail, worst
from giornata_tools.provenance import installed

STYLES: Final = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}

Check = tuple[str, Callable[[], Awaitable[Finding]]]
"""A check's name, and what it does."""


@dataclass(frozen=True)
class CheckedSystem:
    """What there is to look at."""

    root: Path | None
    """The checkout."""
    gateway_url: str
    gateway_named: bool
    """Whether the user has named it; the local one need not run."""
    nats_url: str | None
    redis_url: str | None
    model: str | None


@click.command()
@url_option
@nats_option
@redis_option
@click.option(
    "--model",
    envvar="GIORNATA_MODEL",
    show_envvar=True,
    metavar="FOLDER_OR_ID",
    help="Checkpoint to look at.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    *,
    url: str | None,
    nats_url: str | None,
    redis_url: str | None,
    model: str | None,
    as_json: bool,
) -> None:
    """Look at everything that an edit on this machine needs; say what is missing and what to do.

    In a checkout that is the whole system, elsewhere only the way to a gateway.

    Exit status 1 if something essential is missing. Warnings are no failure.
    """
    around = CheckedSystem(checkout.find(), gateway_of(url), url is not None, nats_url, redis_url, model)
    ctx.exit(interrupts.run(lambda: run(around, as_json=as_json)))


async def run(around: CheckedSystem, *, as_json: bool) -> int:
    """Check everything at once, print, and tell by the exit status."""
    runtime.configure_logs("critical", "console", "giornata")  # what servers refuse or fail at is a finding
    findings = await examine(around)
    verdict = worst(findings)
    if as_json:
        click.echo(json.dumps({"verdict": verdict, "checks": [asdict(one) for one in findings]}, indent=2))
    else:
        Console(highlight=False).print(table(findings), Text(f"\n{summary(findings)}"))
    return 1 if verdict is Verdict.FAIL else 0


async def examine(around: CheckedSystem) -> list[Finding]:
    """Every finding, in the order in which problems are mended.

    Without a checkout nothing can be started here: then what a system needs is not looked at, and a gateway is needed.
    """
    place, needed = urlsplit(around.gateway_url), around.gateway_named or around.root is None
    serving = asyncio.ensure_future(
        _guarded(
            "Services",
            lambda: servers.gateway(around.gateway_url, named=needed),
        )
    )

    async def port() -> Finding:
        answered = (await serving).verdict is Verdict.OK
        number = place.port or (443 if place.scheme == "https" else 80)
        return await asyncio.to_thread(machine.port, place.hostname or "", number, answered=answered)

    want = packages.wanted(around.root) if around.root else {"giornata": installed("giornata") or ""}
    client: list[Check] = [
        ("Python", _threaded(packages.python)),
        ("Distributions", _threaded(lambda: packages.distributions(want))),
        ("Packages", _threaded(lambda: packages.requirements(want))),
    ]
    outside: list[Check] = [
        ("NATS", lambda: servers.nats_server(around.nats_url)),
        ("Redis", lambda: servers.blob_store(around.redis_url)),
        ("Services", lambda: serving),
    ]
    system = _system(around, around.root, port) if around.root else []
    checks = [*client, *system, *outside]
    return await asyncio.gather(*(_guarded(name, check) for name, check in checks))


def _system(around: CheckedSystem, root: Path, port: Callable[[], Awaitable[Finding]]) -> list[Check]:
    """What the checkout `root` needs of this machine to run everything."""
    return [
        ("torch", _threaded(accelerator.torch)),
        ("nats-server", _threaded(lambda: machine.nats_server(needed=around.nats_url is None))),
        ("valkey-server", _threaded(lambda: machine.valkey_server(needed=around.redis_url is None))),
        ("Disk", _threaded(lambda: machine.disk(root))),
        ("Memory", _threaded(machine.memory)),
        ("Model", _threaded(lambda: servers.model(around.model))),
        ("Port", port),
        ("Browser", _threaded(machine.browser)),
    ]


def table(findings: Sequence[Finding]) -> Table:
    """A line per finding, and the remedy below it."""
    lines = Table(box=None, show_header=False, pad_edge=False)
    for one in findings:
        told = Text(one.sentence)
        if one.remedy:
            told.append(f"\n→ {one.remedy}", "italic")
        lines.add_row(Text(one.verdict, STYLES[one.verdict]), Text(one.name), told)
    return lines


def summary(findings: Sequence[Finding]) -> str:
    """The report in a sentence."""
    missing = [one.name for one in findings if one.verdict is Verdict.FAIL]
    if missing:
        return f"To be mended: {', '.join(missing)}."
    warned = ", ".join(one.name for one in findings if one.verdict is Verdict.WARN)
    return f"Nothing essential is missing; look at: {warned}." if warned else "Nothing is missing."


async def _guarded(name: str, check: Callable[[], Awaitable[Finding]]) -> Finding:
    """A check that fails itself is a finding, too: the others are told all the same."""
    try:
        return await check()
    except Exception as error:  # noqa: BLE001 - the check's edge: told in the report
        return fail(name, f"The check itself failed: {type(error).__name__}.", "Please report it.")


def _threaded(check: Callable[[], Finding]) -> Callable[[], Awaitable[Finding]]:
    return lambda: asyncio.to_thread(check)
