"""What ``giornata edit`` and ``giornata generate`` have in common: their options, the door, the way of an order."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import click

from giornata.wire.errors import DeadlineExceeded
from giornata.wire.requests import GenerationParameters, OutputFormat
from giornata_tools import interrupts
from giornata_tools.bars import edit_steps
from giornata_tools.cli.edit import delivery
from giornata_tools.cli.edit.adapters import in_order
from giornata_tools.cli.edit.delivery import STDOUT, EditDelivery, writing
from giornata_tools.cli.edit.parameters import validated
from giornata_tools.cli.options import ABOVE_0, api_key_option, door_of, door_options, typed
from giornata_tools.doors.addresses import is_web
from giornata_tools.doors.edits import (
    EditCall,
    EditClient,
    EditProgress,
    EditStopped,
    Preview,
    RequestRefused,
)

NATS_TIMEOUT_S: Final = 120.0
"""What the NATS door allows unless told otherwise; over HTTP the gateway decides."""
PROBE_BYTES: Final = 1 << 20
"""About the size of a picture."""

SOURCE: Final = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)

Opening = AbstractAsyncContextManager[EditClient]

_OPTIONS: Final = (
    click.option(
        "--reference",
        "references",
        type=SOURCE,
        multiple=True,
        metavar="PICTURE",
        help="Another picture that the model looks at; repeat it for several. GET /v1/models tells how many it takes.",
    ),
    click.option(
        "--control-image",
        "control_images",
        type=SOURCE,
        multiple=True,
        metavar="PICTURE",
        help="What a ControlNet sees; repeat it for several. ControlNets that name no image and no annotator see them "
        "in their order.",
    ),
    click.option(
        "-o",
        "--output",
        "out",
        required=True,
        metavar="OUT",
        help="Where to write; an existing file is replaced, - is standard output. Several pictures become OUT-0.png, "
        "OUT-1.png and so on.",
    ),
    door_options,
    api_key_option,
    click.option(
        "--tenant",
        default="default",
        show_default=True,
        help="Whose key that is; for large pictures over NATS.",
    ),
    click.option(
        "--timeout",
        "timeout_s",
        type=ABOVE_0,
        metavar="SECONDS",
        help=f"Cancel the job after this long.  [default: what the gateway allows; {NATS_TIMEOUT_S:g} over NATS]",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print a report as JSON: files, seeds, job, error."),
    click.option(
        "--progress/--no-progress", default=True, help="A bar on standard error, where that is a terminal."
    ),
    click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors."),
)


@dataclass(frozen=True)
class EditCommandOptions:
    """What the options that both commands share say."""

    references: tuple[str, ...]
    control_images: tuple[str, ...]
    out: str
    url: str | None
    nats_url: str | None
    blobs_url: str | None
    api_key: str | None
    tenant: str
    timeout_s: float | None
    as_json: bool
    progress: bool
    quiet: bool


def sending_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options that :class:`EditCommandOptions` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def read_options(
    ctx: click.Context, options: dict[str, Any], kind: type[GenerationParameters]
) -> tuple[EditCommandOptions, dict[str, object], tuple[str, ...]]:
    """How to send, which fields of a `kind` were typed, and a file for each picture; `options` are the command's.

    Raises:
        click.UsageError: names the options at fault.
    """
    sending = EditCommandOptions(**{field.name: options[field.name] for field in fields(EditCommandOptions)})
    named = typed(ctx)
    given: dict[str, Any] = {name: options[name] for name in kind.model_fields if name in named}
    files, given["output_format"] = _destinations(sending.out, options["n"], given.get("output_format"))
    if "controlnets" in given:
        given["controlnets"] = in_order(given["controlnets"], len(sending.control_images))
    validated(kind, given)
    if sending.out == STDOUT and given.get("partial_images"):
        raise click.UsageError("--partial-images are files beside OUT, which -o - has none of.")
    if sending.as_json and sending.out == STDOUT:
        raise click.UsageError("--json and -o - both write to standard output; give one.")
    return sending, given, files


def read(name: str) -> bytes:
    """The file `name`, or standard input."""
    with click.open_file(name, "rb") as file:
        return bytes(file.read())


def carry_out(
    ctx: click.Context, sending: EditCommandOptions, order: Callable[[], EditCall], files: tuple[str, ...]
) -> None:
    """Send what `order` makes, write its pictures to `files`, and leave with the exit status."""
    opening = _opening(door_of(ctx, sending.url, sending.nats_url), sending)
    asked = replace(
        order(),
        references=tuple(map(read, sending.references)),
        control_images=tuple(map(read, sending.control_images)),
    )
    report = EditDelivery(files, sending.as_json, sending.quiet)
    shown = sending.progress and not sending.quiet
    ctx.exit(interrupts.run(lambda: run(opening, asked, report, sending.timeout_s, progress=shown)))


def _opening(address: str, how: EditCommandOptions) -> Opening:
    """The door at `address`, open while inside."""
    if is_web(address):
        from giornata_tools.doors.http_door import open_http

        return open_http(address, how.api_key)
    from giornata_tools.doors.nats_door import open_nats

    return open_nats(address, how.blobs_url, how.api_key, how.tenant, how.timeout_s or NATS_TIMEOUT_S)


async def run(
    opening: Opening, order: EditCall, report: EditDelivery, timeout_s: float | None, *, progress: bool
) -> int:
    """Hand the order in, write its pictures, report; the exit status."""
    started_s = time.monotonic()
    try:
        _probe(report.files)
        with edit_steps(len(report.files), shown=progress) as draw:

            def tell(told: EditProgress | Preview) -> None:
                if isinstance(told, Preview):
                    report.preview(told)
                else:
                    draw(told)

            async with asyncio.timeout(timeout_s) as limit, opening as door:
                outcome = await door.edit(order, tell)
    except TimeoutError:
        return report.refused(DeadlineExceeded().body())
    except RequestRefused as error:
        return report.refused(error.body)
    except EditStopped as stopped:
        if limit.expired():
            late = DeadlineExceeded(f"The job took longer than {timeout_s:g} s. {stopped}")
            return report.refused(late.body())
        report.stopped(str(stopped))
        return interrupts.INTERRUPTED
    return report.finished(outcome, time.monotonic() - started_s)


def _destinations(out: str, n: int, chosen: str | None) -> tuple[tuple[str, ...], OutputFormat]:
    """A file for each of `n` pictures, and their format.

    Raises:
        click.BadParameter: `out` is no name for them.
    """
    try:
        output_format = delivery.format_of(out, OutputFormat(chosen) if chosen else None)
        files = tuple(delivery.files(out, n))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="-o") from error
    for path in map(Path, files if out != STDOUT else ()):
        if path.is_dir():
            raise click.BadParameter(f"{path} is a folder.", param_hint="-o")
        if not path.parent.is_dir():
            raise click.BadParameter(f"There is no folder {path.parent}.", param_hint="-o")
    return files, output_format


def _probe(files: tuple[str, ...]) -> None:
    """A picture that took a minute is not to be lost for a disk that is full or a folder that takes no files.

    Leaves no trace: files that exist are opened and not changed, beside others a nameless one lives for a moment.

    Raises:
        Refused: one of `files` cannot be written.
    """
    for path in map(Path, files if files != (STDOUT,) else ()):
        with writing(str(path)):
            if path.is_file():
                path.open("ab").close()
            elif not path.exists():  # pipes and devices are left alone
                with tempfile.TemporaryFile(dir=path.parent) as beside:
                    beside.write(bytes(PROBE_BYTES))
