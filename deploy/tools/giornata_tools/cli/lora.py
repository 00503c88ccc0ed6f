"""``giornata lora``: adapters that edits can name."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from giornata.logs import configure_logs
from giornata.wire.errors import GiornataError
from giornata.wire.loras import LoraRecord
from giornata.wire.subjects import NatsRole
from giornata_tools import terminal
from giornata_tools.cli import extras
from giornata_tools.cli.options import COUNT, folder_option, login_of, server_option, user_options
from giornata_tools.clients.edits import sentence
from giornata_tools.terminal import drawn

if TYPE_CHECKING:
    from giornata_tools.lora_profiler.probes import Probe
    from giornata_tools.lora_profiler.profiler import (
        Done,
        JoinStepTrial,
        LoraProfile,
        ProbeSetting,
        ProfilerLogin,
    )

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final

from rich.table import Table

from giornata.wire.errors import ErrorBody
from giornata_tools.cli.groups import gateway_command, listed, tell_all
from giornata_tools.cli.options import READABLE
from giornata_tools.clients.http import HttpClient, uploaded
from giornata_tools.terminal import show, table


@click.group()
def lora() -> None:
    """Upload, list, pin, remove and profile LoRAs.

    A LoRA is a file of safetensors for one model, with the names of diffusers, PEFT, kohya or XLabs.
    """


_of_lora: Final = partial(gateway_command, lora)


@_of_lora("add")
@click.argument("file", type=READABLE)
@click.option("--model", metavar="NAME", help="The model that it is for; default: the one that is served.")
@click.option("--name", metavar="TEXT", help="What to call it; default: the file's name.")
async def add(gateway: HttpClient, file: Path, model: str | None, name: str | None, *, as_json: bool) -> int:
    """Upload FILE, and wait until it can be used."""
    fields = {"model": model, "name": name}
    told = await uploaded(gateway, file, {key: text for key, text in fields.items() if text})
    if as_json:
        click.echo(json.dumps(told, indent=2))
    elif told["state"] == "ready":
        click.echo(told["id"])
        click.echo(f"Ready: rank {told['rank']}, {told['modules']} modules of {told['model']}.", err=True)
    if told["state"] == "ready":
        return 0
    error = told["error"] or {"code": told["state"], "message": "It was removed."}
    click.echo(f"Error: {sentence(ErrorBody.model_validate(error))}", err=True)
    return 1


@_of_lora("list")
async def list_loras(gateway: HttpClient, *, as_json: bool) -> None:
    """Show those that the API key may use, the newest first."""
    tell_all(await listed(gateway, "/v1/loras"), _table, "There is no LoRA.", as_json=as_json)


@_of_lora("show")
@click.argument("lora_id", metavar="ID")
async def show_lora(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Show all that is known of one."""
    told = await gateway.read(f"/v1/loras/{lora_id}")
    if as_json:
        click.echo(json.dumps(told, indent=2))
    else:
        show(_table([told]))
        if told["error"] is not None:
            click.echo(f"{told['error']['code']}: {told['error']['message']}")


@_of_lora("rm")
@click.argument("lora_id", metavar="ID")
async def remove(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Remove one. Edits that have begun end as before."""
    told = await gateway.delete(f"/v1/loras/{lora_id}")
    _told(told, f"{lora_id} is removed.", as_json=as_json)


@_of_lora("pin")
@click.argument("lora_id", metavar="ID")
async def pin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Have every host keep one."""
    told = await gateway.put(f"/v1/loras/{lora_id}/pin")
    _told(told, f"{lora_id} is pinned.", as_json=as_json)


@_of_lora("unpin")
@click.argument("lora_id", metavar="ID")
async def unpin(gateway: HttpClient, lora_id: str, *, as_json: bool) -> None:
    """Let hosts let go of one again."""
    told = await gateway.delete(f"/v1/loras/{lora_id}/pin")
    _told(told, f"{lora_id} is not pinned.", as_json=as_json)


def _told(told: dict[str, Any], sentence: str, *, as_json: bool) -> None:
    """Print the gateway's answer, or what it comes to."""
    click.echo(json.dumps(told) if as_json else sentence, err=not as_json)


def _table(loras: Sequence[dict[str, Any]]) -> Table:
    lines = table(
        *("id", "name", "model", "state", "rank", "joins within", "MB"),
        numbers={"rank", "joins within", "MB"},
    )
    for one in loras:
        state = one["state"] if one["error"] is None else f"{one['state']}: {one['error']['code']}"
        share = one.get("joins_within")  # pictures, or an older gateway, may not tell
        within = "" if share is None else f"{share:.0%}"
        about = (str(one[name] or "") for name in ("id", "name", "model"))
        lines.add_row(*about, state, str(one["rank"] or ""), within, f"{one['bytes'] / 1e6:.1f}")
    return lines


# ``giornata lora profile``: how late LoRAs may join, seen in pictures.


@lora.command("profile")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--watch", is_flag=True, help="Stay, and profile what is uploaded until Ctrl-C.")
@user_options(NatsRole.PROFILER, "of the system")
@server_option(
    "--blobs",
    "blobs_url",
    envvar="GIORNATA_BLOBS_URL",
    help="Blob store; needed where a finished picture is above 8 MB.",
)
@folder_option(
    "--probes",
    help="Pictures to edit, each with NAME-mask.png and NAME.txt, its prompt. Default: eight scenes for a model of "
    "small pictures, three photographs for others.",
)
@click.option("--steps", type=COUNT, metavar="N", help="Denoising steps; default the model's.")
@click.option(
    "--padding-mask-crop",
    type=click.IntRange(0),
    metavar="PX",
    help="As of an edit; default: whole pictures.",
)
@click.option(
    "--at-most",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.5,
    show_default=True,
    metavar="SHARE",
    help="Share of the steps beyond which nothing is tried.",
)
@click.option("--in-flight", type=COUNT, default=2, show_default=True, metavar="N", help="Edits at a time.")
@click.option(
    "--timeout-s",
    type=float,
    default=900.0,
    show_default=True,
    metavar="S",
    help="For one edit, with its wait.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each LoRA.")
@click.pass_context
def profile(ctx: click.Context, /, ids: tuple[str, ...], **given: Any) -> None:
    """See how late each LoRA may join a picture, and have the LoRA store keep it.

    Edits of some probes are made with the LoRA in every step, then with one that joins later and later. The largest
    share of the steps after which pictures are still alike (mean SSIM in the masks' boxes, less two standard errors,
    at least 0.95) is kept in the LoRA's record: requests with --lora-wait bounded may begin so much without it. The
    edits have the priority batch.

    Without ID: all LoRAs that were not profiled yet, of every tenant.
    """
    if ids and given["watch"]:
        raise click.UsageError("--watch profiles what comes; leave it or the ids out.")
    url, password_file, blobs_url = login_of(given["url"], given["password_file"], NatsRole.PROFILER)
    extras.require("profiling")
    from giornata_tools.lora_profiler.probes import ProbesError, read_folder
    from giornata_tools.lora_profiler.profiler import ProbeSetting, ProfilerLogin

    login = ProfilerLogin(url, password_file, given["blobs_url"] or blobs_url)
    names = ("steps", "padding_mask_crop", "at_most", "in_flight", "timeout_s")
    setting = ProbeSetting(**{name: given[name] for name in names})
    try:
        probes = None if given["probes"] is None else read_folder(given["probes"])
    except (ProbesError, OSError) as error:
        raise click.UsageError(f"--probes: {error}") from error
    show = LoraProfileOutput(as_json=given["as_json"])
    ctx.exit(terminal.run(lambda: _run(login, setting, probes, ids, show, watches=given["watch"])))


async def _run(
    login: ProfilerLogin,
    setting: ProbeSetting,
    probes: list[Probe] | None,
    ids: tuple[str, ...],
    show: LoraProfileOutput,
    *,
    watches: bool,
) -> int:
    from giornata_tools.lora_profiler.profiler import connected

    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    try:
        async with connected(login, setting, probes) as session:
            with drawn("waiting", shown=not show.as_json) as show.update:
                if watches:
                    await session.watch(show.begin, show.ended)
                records = await session.found(ids) if ids else await session.due()
                if not records:
                    click.echo("Every LoRA is profiled.", err=True)
                return 0 if await session.profile(records, show.begin, show.ended) else 1
    except GiornataError as error:
        click.echo(f"Error: {sentence(error.body())}", err=True)
    return 1


class LoraProfileOutput:
    """The report of a profile, for a person or for a program."""

    def __init__(self, *, as_json: bool) -> None:
        self.as_json = as_json
        self.update: Any = None
        """Moves the bar, where there is one: see :func:`giornata_tools.terminal.drawn`."""

    def begin(self, record: LoraRecord) -> Done:
        """A LoRA's turn has come."""
        name = record.name or record.lora_id

        def done(edits: int, tried: JoinStepTrial | None) -> None:
            if self.update:
                seen = f", after {tried.step} of {tried.steps} steps: SSIM {tried.mean:.3f}" if tried else ""
                self.update(edits, None, f"{name}{seen}")

        return done

    def ended(self, record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        """Its turn is over."""
        if isinstance(outcome, GiornataError):
            click.echo(f"Error: {record.lora_id}: {sentence(outcome.body())}", err=True)
        elif self.as_json:
            click.echo(json.dumps(_line(outcome)))
        else:
            click.echo(told(outcome))


def told(profile: LoraProfile) -> str:
    """Return what came out, in lines for a person."""
    record, steps = profile.record, profile.steps
    name = f"{record.lora_id} ({record.name})" if record.name else record.lora_id
    kept = round(profile.joins_within * steps)
    lines = [
        f"{name}: may join after {kept} of {steps} steps"
        if kept
        else f"{name}: acts in every step; it may not join late"
    ]
    lines += [
        f"  after {one.step:>3}: SSIM {one.mean:.3f} ± {one.error:.3f}, least {one.least:.3f}"
        + ("" if one.alike else "  too far")
        for one in profile.tried
    ]
    return "\n".join(lines)


def _line(profile: LoraProfile) -> dict[str, Any]:
    return {
        "id": profile.record.lora_id,
        "name": profile.record.name,
        "model": profile.record.model,
        "joins_within": profile.joins_within,
        "steps": profile.steps,
        "tried": [
            {
                "step": one.step,
                "share": one.share,
                "ssim": round(one.mean, 4),
                "error": round(one.error, 4),
                "least": round(one.least, 4),
            }
            for one in profile.tried
        ],
    }
