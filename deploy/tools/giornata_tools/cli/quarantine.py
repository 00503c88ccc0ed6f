"""``giornata quarantine``: jobs that were given up since every worker that had them was lost."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
import nats.errors
from rich.table import Table

from giornata.bus import bus
from giornata.logs import configure_logs, escape_controls
from giornata.records import Quarantine
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import JobRecord
from giornata.wire.subjects import NatsRole
from giornata_tools.cli.groups import Act, grouped
from giornata_tools.cli.options import connection_failure, login_of, user_options
from giornata_tools.terminal import show, table


@click.group()
def quarantine() -> None:
    """Look into edits that were given up since every worker that had them was lost.

    Such an edit may be what brings workers down. Its record tells how each attempt was lost and what was asked for; it
    is kept for a week.
    """


def _asking(
    act: Act, url: str | None, password_file: Path | None, **given: Any
) -> Callable[[], Awaitable[int]]:
    servers, password, _ = login_of(url, password_file, NatsRole.OPERATOR)
    return lambda: _connected(servers, password, partial(act, **given))


_OPTIONS: Final = (user_options(NatsRole.OPERATOR, "that keep the records"),)
_command: Final = partial(grouped, quarantine, _asking, _OPTIONS)


@_command("list")
async def list_jobs(kept: Quarantine, *, as_json: bool) -> None:
    """Show them all with their causes."""
    records = await kept.all()
    if as_json:
        click.echo(json.dumps([_line(record) for record in records], indent=2))
    elif records:
        show(_table(records))
    else:
        click.echo("No edit is in quarantine.", err=True)


@_command("show")
@click.argument("job_id", metavar="JOB")
async def show_job(kept: Quarantine, job_id: str, *, as_json: bool) -> None:
    """Show all that is known of one."""
    record = await kept.get(job_id)
    if as_json:
        click.echo(record.model_dump_json(indent=2))
        return
    click.echo(f"{record.job.job_id}, tenant {record.job.tenant}, model {record.job.model}")
    for cause in record.causes:
        click.echo(f"  {escape_controls(str(cause))}")
    if record.error is not None:
        click.echo(escape_controls(f"  {record.error.code}: {record.error.message}"))
    asked = record.job.parameters.model_dump(mode="json", exclude_defaults=True)
    click.echo(escape_controls(json.dumps(asked, indent=2, ensure_ascii=False), "\n"))


@_command("release")
@click.argument("job_id", metavar="JOB")
async def release_job(kept: Quarantine, job_id: str, *, as_json: bool) -> None:
    """Forget one: its record is removed, and not kept for the rest of the week. It is not carried out again."""
    record = await kept.remove(job_id)
    if as_json:
        click.echo(json.dumps(_line(record), indent=2))
    else:
        click.echo(f"Job {job_id} is in quarantine no more.", err=True)


async def _connected(
    url: str, password_file: Path | None, act: Callable[[Quarantine], Awaitable[None]]
) -> int:
    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    connecting = bus.connect(url, "giornata-cli", user=NatsRole.OPERATOR, password_file=password_file)
    try:
        async with connecting as connected:
            await act(await Quarantine.open(connected.jetstream))
    except GiornataError as error:
        failure = connection_failure(error, url)
    except nats.errors.Error:
        failure = (
            "The quarantine does not answer: no router has run there yet, or --password-file is missing: only the "
            "NATS user operator may read it."
        )
    else:
        return 0
    click.echo(f"Error: {failure}", err=True)
    return 1


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
    lines = table("job", "tenant", "model", "pictures", "causes", numbers={"pictures"}, prose={"causes"})
    for record in records:
        job = record.job
        lines.add_row(job.job_id, job.tenant, job.model, str(len(record.rows)), "; ".join(record.causes))
    return lines
