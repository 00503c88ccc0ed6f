"""``giornata edit``: one edit, its progress, its pictures; Ctrl-C cancels it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from giornata.cli import interrupts, outputs
from giornata.cli.addresses import Http, Nats
from giornata.cli.connecting import api_key_option, door_of, nats_option, redis_option, url_option
from giornata.cli.edits import Door, Order, Outcome, Preview, Refused, Stopped, Told
from giornata.cli.parameters import options, validated
from giornata.cli.progress import bar
from giornata.cli.report import Report
from giornata.errors import DeadlineExceeded
from giornata.requests import EditParameters, OutputFormat

NATS_TIMEOUT_S: Final = 120.0
"""What the NATS door allows unless told otherwise; over HTTP the gateway decides."""

SOURCE: Final = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)


@dataclass(frozen=True)
class Reach:
    """Whom to ask, and how long to wait."""

    door: Http | Nats
    redis_url: str | None
    api_key: str | None
    tenant: str
    timeout_s: float | None

    def open(self) -> AbstractAsyncContextManager[Door]:
        """The door, open while inside."""
        if isinstance(self.door, Http):
            from giornata.cli.http_door import open_http  # noqa: PLC0415 - half a second that help need not take

            return open_http(self.door.url, self.api_key)
        from giornata.cli.nats_door import open_nats  # noqa: PLC0415 - likewise

        return open_nats(
            self.door.url, self.redis_url, self.api_key, self.tenant, self.timeout_s or NATS_TIMEOUT_S
        )


@click.command(params=options(EditParameters, {"output_format": "what OUT ends with"}))
@click.argument("image", type=SOURCE, metavar="IN")
@click.option(
    "--mask",
    type=SOURCE,
    help="What to repaint, white or transparent. Without it: the transparent part of IN, or all of an opaque one.",
)
@click.option(
    "-o",
    "--output",
    "out",
    required=True,
    metavar="OUT",
    help="Where to write; an existing file is replaced, - is standard output. Several pictures become OUT-0.png, "
    "OUT-1.png and so on.",
)
@url_option
@nats_option
@redis_option
@api_key_option
@click.option(
    "--tenant", default="default", show_default=True, help="Whose key that is; for large pictures over NATS."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help=f"Cancel the edit after this long.  [default: what the gateway allows; {NATS_TIMEOUT_S:g} over NATS]",
)
@click.option("--json", "as_json", is_flag=True, help="Print a report as JSON: files, seeds, job, error.")
@click.option(
    "--progress/--no-progress", default=True, help="A bar on standard error, where that is a terminal."
)
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
@click.pass_context
def edit(
    ctx: click.Context,
    /,
    *,
    image: str,
    mask: str | None,
    out: str,
    url: str | None,
    nats_url: str | None,
    redis_url: str | None,
    api_key: str | None,
    tenant: str,
    timeout_s: float | None,
    as_json: bool,
    progress: bool,
    quiet: bool,
    **parameters: Any,
) -> None:
    """Repaint the masked part of the picture IN as the prompt says, and write OUT.

    PNG, JPEG and WebP are read; OUT is written in the format that its name ends with. Pixels outside the mask stay
    exactly as they are in IN.
    """
    given = {
        name: value
        for name, value in parameters.items()
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT
    }
    try:
        chosen = given.get("output_format")
        given["output_format"] = outputs.format_of(out, OutputFormat(chosen) if chosen else None)
        files = outputs.files(out, parameters["n"])
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="-o") from error
    validated(given)
    if out == outputs.STDOUT and parameters.get("partial_images"):
        raise click.UsageError("--partial-images are files beside OUT, which -o - has none of.")
    if as_json and out == outputs.STDOUT:
        raise click.UsageError("--json and -o - both write to standard output; give one.")
    if image == mask == outputs.STDOUT:
        raise click.UsageError("Standard input holds one picture, not IN and the mask.")
    _check_writable(files)
    reach = Reach(door_of(ctx, url, nats_url), redis_url, api_key, tenant, timeout_s)
    order = Order(_read(image), None if mask is None else _read(mask), given)
    report = Report(tuple(files), as_json, quiet)
    ctx.exit(interrupts.run(lambda: run(reach, order, report, progress=progress and not quiet)))


FIRST: Final = ("image", "prompt", "mask", "out")
edit.params.sort(key=lambda parameter: FIRST.index(parameter.name) if parameter.name in FIRST else len(FIRST))


async def run(reach: Reach, order: Order, report: Report, *, progress: bool) -> int:
    """Hand the order in, write its pictures, report; the exit status."""
    started_s = time.monotonic()
    try:
        async with asyncio.timeout(reach.timeout_s) as limit:
            outcome = await _carried_out(reach, order, report, progress=progress)
    except TimeoutError:
        return report.refused(DeadlineExceeded().body())
    except Refused as error:
        return report.refused(error.body)
    except Stopped as stopped:
        if limit.expired():
            late = DeadlineExceeded(f"The edit took longer than {reach.timeout_s:g} s. {stopped}")
            return report.refused(late.body())
        report.stopped(str(stopped))
        return interrupts.INTERRUPTED
    return report.finished(outcome, time.monotonic() - started_s)


async def _carried_out(reach: Reach, order: Order, report: Report, *, progress: bool) -> Outcome:
    with bar(len(report.files), shown=progress) as draw:

        def tell(told: Told | Preview) -> None:
            if isinstance(told, Preview):
                report.preview(told)
            else:
                draw(told)

        async with reach.open() as door:
            return await door.edit(order, tell)


def _check_writable(files: Sequence[str]) -> None:
    """A picture that took a minute is not to be lost for a folder that is missing."""
    for name in files:
        path = Path(name)
        if name != outputs.STDOUT and path.is_dir():
            raise click.BadParameter(f"{path} is a folder.", param_hint="-o")
        if name != outputs.STDOUT and not path.parent.is_dir():
            raise click.BadParameter(f"There is no folder {path.parent}.", param_hint="-o")


def _read(name: str) -> bytes:
    with click.open_file(name, "rb") as file:
        return bytes(file.read())
