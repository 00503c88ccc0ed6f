"""``giornata quarantine``: jobs that were given up since every worker that had them was lost."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import click
import nats.errors
from rich.console import Console
from rich.table import Table

from giornata import runtime
from giornata.bus import bus
from giornata.records import Quarantine
from giornata.wire.errors import GiornataError, ServiceUnavailable
from giornata.wire.jobs import JobRecord
from giornata.wire.permissions import User
from giornata_tools import interrupts
from giornata_tools.doors.addresses import NATS_VARIABLE, nats_urls

LOCAL_NATS: Final = "nats://127.0.0.1:4222"
Command = Callable[..., Any]


def connection_options(command: Command) -> Command:
    """Options of where the records are, and who asks."""
    for option in (
        click.option(
            "--password-file",
            envvar="GIORNATA_NATS_PASSWORD_FILE",
            show_envvar=True,
            type=click.Path(exists=True, dir_okay=False, readable=True, path_type=Path),
            metavar="FILE",
            help="Holds the password of the NATS user `operator`, where the server asks for one.",
        ),
        click.option(
            "--nats",
            "url",
            envvar=NATS_VARIABLE,
            show_envvar=True,
            default=LOCAL_NATS,
            show_default=True,
            metavar="URL",
            help="NATS server(s) that keep the records.",
        ),
    ):
        command = option(command)
    return command


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def quarantine() -> None:
    """Look into edits that were given up since every worker that had them was lost.

    Such an edit may be what brings workers down. Its record tells how each attempt was lost and what was asked for; it
    is kept for a week.
    """


@quarantine.command("list")
@connection_options
@json_option
@click.pass_context
def list_jobs(ctx: click.Context, url: str, password_file: Path | None, *, as_json: bool) -> None:
    """Show them all with their causes."""

    async def show(kept: Quarantine) -> None:
        records = await kept.all()
        if as_json:
            click.echo(json.dumps([_line(record) for record in records], indent=2))
        elif records:
            Console().print(_table(records))
        else:
            click.echo("No edit is in quarantine.", err=True)

    ctx.exit(_run(url, password_file, show))


@quarantine.command("show")
@connection_options
@json_option
@click.argument("job_id", metavar="JOB")
@click.pass_context
def show_job(ctx: click.Context, url: str, password_file: Path | None, job_id: str, *, as_json: bool) -> None:
    """Show all that is known of one."""

    async def show(kept: Quarantine) -> None:
        record = await kept.get(job_id)
        if as_json:
            click.echo(record.model_dump_json(indent=2))
            return
        click.echo(f"{record.job.job_id}, tenant {record.job.tenant}, model {record.job.model}")
        for cause in record.causes:
            click.echo(f"  {cause}")
        if record.error is not None:
            click.echo(f"  {record.error.code}: {record.error.message}")
        asked = record.job.parameters.model_dump(mode="json", exclude_defaults=True)
        click.echo(json.dumps(asked, indent=2, ensure_ascii=False))

    ctx.exit(_run(url, password_file, show))


@quarantine.command("release")
@connection_options
@json_option
@click.argument("job_id", metavar="JOB")
@click.pass_context
def release_job(
    ctx: click.Context, url: str, password_file: Path | None, job_id: str, *, as_json: bool
) -> None:
    """Forget one: its record is removed, and not kept for the rest of the week. It is not carried out again."""

    async def release(kept: Quarantine) -> None:
        record = await kept.remove(job_id)
        if as_json:
            click.echo(json.dumps(_line(record), indent=2))
        else:
            click.echo(f"Job {job_id} is in quarantine no more.", err=True)

    ctx.exit(_run(url, password_file, release))


def _run(url: str, password_file: Path | None, act: Callable[[Quarantine], Awaitable[None]]) -> int:
    """Connect and act; the exit status."""
    try:
        nats_urls(url)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    return interrupts.run(lambda: _connected(url, password_file, act))


async def _connected(
    url: str, password_file: Path | None, act: Callable[[Quarantine], Awaitable[None]]
) -> int:
    runtime.configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    try:
        async with bus.connect(
            url, "giornata-cli", user=User.OPERATOR, password_file=password_file
        ) as connected:
            await _act(connected, act)
    except GiornataError as error:
        click.echo(f"Error: {error}", err=True)
        return 1
    return 0


async def _act(connected: bus.Bus, act: Callable[[Quarantine], Awaitable[None]]) -> None:
    try:
        await act(await Quarantine.open(connected.jetstream))
    except nats.errors.Error as error:
        raise ServiceUnavailable(
            "The quarantine does not answer: no router has run here yet, or --password-file is missing: only the NATS "
            "user operator may read it."
        ) from error


def _line(record: JobRecord) -> dict[str, Any]:
    return {
        "job_id": record.job.job_id,
        "tenant": record.job.tenant,
        "model": record.job.model,
        "priority": str(record.job.priority),
        "pictures": len(record.rows),
        "spent_ms": record.spent_ms,
        "causes": list(record.causes),
    }


def _table(records: list[JobRecord]) -> Table:
    table = Table("job", "tenant", "model", "pictures", "causes")
    for record in records:
        job = record.job
        table.add_row(job.job_id, job.tenant, job.model, str(len(record.rows)), "\n".join(record.causes))
    return table
