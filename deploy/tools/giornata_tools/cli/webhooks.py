"""``giornata webhooks``: those that no receiver has taken yet."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from urllib.parse import quote

import click
from rich.table import Table

from giornata_tools.cli.groups import gateway_command, listed, tell_all
from giornata_tools.clients.http import HttpClient
from giornata_tools.terminal import table

PATH: Final = "/v1/webhooks"
DEAD: Final = "dead"
"""The state of one that was given up."""


@click.group()
def webhooks() -> None:
    """List, retry and remove webhooks that were not taken.

    A webhook tells a URL of the end of a job; it is named by its job. One that was taken is not listed any more.
    """


_of_webhooks: Final = partial(gateway_command, webhooks)
_jobs: Final = click.argument("job_ids", metavar="[JOB]...", nargs=-1)
_dead: Final = partial(click.option, "--dead", is_flag=True)


@_of_webhooks("list")
@_dead(help="Only those that were given up.")
async def list_webhooks(gateway: HttpClient, *, dead: bool, as_json: bool) -> None:
    """Show those of the API key's tenant, the newest first."""
    found = [hook for hook in await listed(gateway, PATH) if not dead or hook["state"] == DEAD]
    none = "No webhook was given up." if dead else "Every webhook was taken."
    tell_all(found, _table, none, as_json=as_json)


@_of_webhooks("retry")
@_jobs
@_dead(help="All that were given up.")
async def retry(gateway: HttpClient, job_ids: tuple[str, ...], *, dead: bool, as_json: bool) -> None:
    """Send the webhooks of JOBs again that were given up. One that waits for its next attempt stays as it is."""
    await _each(gateway, job_ids, gateway.put, "waits to be sent", dead=dead, as_json=as_json)


@_of_webhooks("rm")
@_jobs
@_dead(help="All that were given up.")
async def remove(gateway: HttpClient, job_ids: tuple[str, ...], *, dead: bool, as_json: bool) -> None:
    """Send the webhooks of JOBs no more. The jobs go on."""
    await _each(gateway, job_ids, gateway.delete, "is removed", dead=dead, as_json=as_json)


@_of_webhooks("secret")
async def secret(gateway: HttpClient, *, as_json: bool) -> None:
    """Print the secret with which the tenant's webhooks are signed."""
    told = await gateway.read("/v1/webhook-secret")
    click.echo(json.dumps(told) if as_json else told["secret"])


async def _each(
    gateway: HttpClient,
    job_ids: tuple[str, ...],
    ask: Callable[[str], Awaitable[dict[str, Any]]],
    done: str,
    *,
    dead: bool,
    as_json: bool,
) -> None:
    """Ask the same of every webhook that is meant, up to the first refusal."""
    if dead == bool(job_ids):
        raise click.UsageError("Name jobs, or all that were given up by --dead.")
    if dead:
        job_ids = tuple(hook["id"] for hook in await listed(gateway, PATH) if hook["state"] == DEAD)
    told = []
    for job_id in job_ids:
        told.append(await ask(f"{PATH}/{quote(job_id, safe='')}"))
        if not as_json:
            click.echo(f"{job_id} {done}.", err=True)
    if as_json:
        click.echo(json.dumps(told, indent=2))


def _table(hooks: Sequence[dict[str, Any]]) -> Table:
    lines = table(
        "job", "url", "state", "attempts", "next", "error", numbers={"attempts"}, prose={"url", "error"}
    )
    for hook in hooks:
        next_s = hook["next_at"]
        at = "" if next_s is None else datetime.fromtimestamp(next_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        lines.add_row(hook["id"], hook["url"], hook["state"], str(hook["attempts"]), at, hook["error"] or "")
    return lines
