"""``giornata lora profile``: how late LoRAs may join, seen in pictures."""

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
    from giornata_tools.lora_profiler.profiler import Done, JoinStepTrial, LoraProfile, ProbeSetting
    from giornata_tools.lora_profiler.sessions import ProfilerLogin, ProfilerSession


@click.command("profile")
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
    from giornata_tools.lora_profiler.profiler import ProbeSetting
    from giornata_tools.lora_profiler.sessions import ProfilerLogin

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
    from giornata_tools.lora_profiler.sessions import connected

    configure_logs("error", "console", "giornata")  # or the library's warnings go to standard output
    try:
        async with connected(login, setting, probes) as session:
            with drawn("waiting", shown=not show.as_json) as show.update:
                if watches:
                    await session.watch(show.begin, show.ended)
                return await _once(session, ids, show)
    except GiornataError as error:
        click.echo(f"Error: {sentence(error.body())}", err=True)
    return 1


async def _once(session: ProfilerSession, ids: tuple[str, ...], show: LoraProfileOutput) -> int:
    records = await session.found(ids) if ids else await session.due()
    if not records:
        click.echo("Every LoRA is profiled.", err=True)
    return 0 if await session.profile(records, show.begin, show.ended) else 1


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
