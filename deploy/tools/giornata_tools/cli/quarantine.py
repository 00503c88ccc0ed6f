"""``giornata quarantine``: jobs that were given up since every worker that had them was lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import click
import nats.errors
from rich.table import Table

from giornata.bus.bus import Bus
from giornata.logs import escape_controls
from giornata.records import Quarantine
from giornata.wire.errors import ServiceUnavailable
from giornata.wire.jobs import JobRecord
from giornata.wire.subjects import NatsRole
from giornata_tools.cli.groups import Act, asks_nats, json_option, tell_all
from giornata_tools.cli.options import Command, user_options
from giornata_tools.terminal import table


@click.group()
def quarantine() -> None:
    """Look into edits that were given up since every worker that had them was lost.

    Such an edit may be what brings workers down. Its record tells how each attempt was lost and what was asked for; it
    is kept for a week.
    """


def _command(name: str) -> Callable[[Act], Command]:
    """Makes an :data:`Act` the command `name` of the group: it is given the quarantine."""

    def made(act: Act) -> Command:
        @user_options(NatsRole.OPERATOR, "that keep the records")
        @json_option
        @asks_nats(NatsRole.OPERATOR)
        @wraps(act)
        async def opened(connection: Bus, **given: Any) -> None:
            try:
                await act(await Quarantine.open(connection.jetstream), **given)
            except nats.errors.Error as error:
                raise ServiceUnavailable(
                    "The quarantine does not answer: no router has run there yet, or --password-file is missing: only "
                    "the NATS user operator may read it."
                ) from error

        return quarantine.command(name)(opened)

    return made


@_command("list")
async def list_jobs(kept: Quarantine, *, as_json: bool) -> None:
    """Show them all with their causes."""
    lines = [_line(record) for record in await kept.all()]
    tell_all(lines, _table, "No edit is in quarantine.", as_json=as_json)


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


def _table(lines: Sequence[dict[str, Any]]) -> Table:
    drawn = table("job", "tenant", "model", "pictures", "causes", numbers={"pictures"}, prose={"causes"})
    for line in lines:
        about = (line[name] for name in ("job_id", "tenant", "model"))
        drawn.add_row(*about, str(line["pictures"]), "; ".join(line["causes"]))
    return drawn
