"""The parts that ``giornata edit`` and ``generate`` share: options, door, the order's way, and where pictures go."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.wire.errors import DeadlineExceeded, ErrorBody, JobCancelled
from giornata.wire.requests import EditParameters, GenerationParameters, OutputFormat
from giornata_tools import terminal
from giornata_tools.cli.options import ABOVE_0, api_key_option, door_of, door_options, typed
from giornata_tools.cli.parameters import in_order, options, sort_first, validated
from giornata_tools.clients.edits import (
    EditCall,
    EditClient,
    EditOutcome,
    EditProgress,
    EditStopped,
    PaintedPicture,
    PictureFailure,
    Preview,
    RequestRefused,
    is_web,
    sentence,
)
from giornata_tools.terminal import edit_steps

# Where one edit's pictures go, from what was typed after ``-o``; what is told of them, in lines or as JSON.


STDOUT: Final = "-"
SUFFIXES: Final[Mapping[str, OutputFormat]] = {
    ".png": OutputFormat.PNG,
    ".jpg": OutputFormat.JPEG,
    ".jpeg": OutputFormat.JPEG,
    ".webp": OutputFormat.WEBP,
}
NOT_WRITTEN: Final = "output_not_written"
"""Code of a file that cannot be written: the command line's own, since no service answers it."""


def format_of(out: str, chosen: OutputFormat | None) -> OutputFormat:
    """The encoding to ask for: the chosen one, else what `out` ends with, else PNG on standard output.

    Raises:
        ValueError: the suffix says nothing; tells which do.
    """
    if chosen is not None:
        return chosen
    if out == STDOUT:
        return OutputFormat.PNG
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{out} does not end with {', '.join(SUFFIXES)}; rename it or give --output-format.")
    return SUFFIXES[suffix]


def picture_files(out: str, n: int) -> list[str]:
    """A name for each picture: `out` itself for one; OUT-0.png, OUT-1.png and so on for several.

    Raises:
        ValueError: several pictures do not fit into standard output.
    """
    if n == 1:
        return [out]
    if out == STDOUT:
        raise ValueError(f"Standard output takes one picture, not {n}; name a file.")
    path = Path(out)
    return [str(path.with_name(f"{path.stem}-{index}{path.suffix}")) for index in range(n)]


def preview_file(file: str, preview: Preview) -> str:
    """The name of a preview of the picture in `file`: edited-preview-0.webp beside edited.png."""
    path = Path(file)
    return str(path.with_name(f"{path.stem}-preview-{preview.partial_image_index}.{preview.format}"))


@dataclass(frozen=True)
class EditDelivery:
    """The place for the pictures of an edit, and the way in which it is reported."""

    files: tuple[str, ...]
    """File names by index of the picture; ``-`` is standard output."""
    as_json: bool = False
    quiet: bool = False
    previews: dict[str, Preview] = field(default_factory=dict)
    """Written so far, by file; another attempt's take the place of the first's."""
    lost: dict[str, PictureFailure] = field(default_factory=dict)
    """What could not be written, by file."""

    def preview(self, preview: Preview) -> None:
        """Write a preview beside its picture; where that fails, the edit goes on and :meth:`finished` tells."""
        name = preview_file(self.files[preview.index], preview)
        self.previews.pop(name, None)
        if self._write(name, preview.index, preview.image):
            self.previews[name] = preview

    def finished(self, outcome: EditOutcome, elapsed_s: float) -> int:
        """Write the pictures, every one that can be, and tell; 1 where a file is missing."""
        written = [p for p in outcome.pictures if self._write(self.files[p.index], p.index, p.data)]
        if self.as_json:
            _print_json(self._value(outcome, written, elapsed_s))
        elif not self.quiet:
            for p in written:
                _say(f"{self.files[p.index]}: {outcome.size}, seed {p.seed}, {elapsed_s:.1f} s")
        for failure in outcome.failures:
            code = f" [{failure.code}]" if failure.code else ""
            _say(f"A picture failed: {failure.sentence}{code}")
        for failure in self.lost.values():
            _say(f"Error: {failure.sentence} [{failure.code}]")
        if len(written) < len(outcome.pictures):
            _say(f"The gateway keeps pictures for a while: GET /v1/jobs/{outcome.job_id}/image")
        return 1 if outcome.failures or self.lost else 0

    def refused(self, body: ErrorBody) -> int:
        """Tell why there is no picture."""
        if self.as_json:
            _print_json({"error": body.model_dump(mode="json", exclude_none=True)})
        _say(f"Error: {sentence(body)}")
        return 1

    def stopped(self, text: str) -> None:
        """Tell what became of the job that was given up."""
        if self.as_json:
            _print_json({"error": {"code": JobCancelled.code, "message": text}})
        _say(text)

    def _write(self, name: str, index: int, data: bytes) -> bool:
        """Write a file; whether that succeeded."""
        try:
            write(name, data)
        except OSError as error:
            self.lost[name] = PictureFailure(_not_written(name, error).message, NOT_WRITTEN, index)
            return False
        self.lost.pop(name, None)
        return True

    def _value(self, outcome: EditOutcome, written: list[PaintedPicture], elapsed_s: float) -> dict[str, Any]:
        failures = (*outcome.failures, *self.lost.values())
        return {
            "job_id": outcome.job_id,
            "size": outcome.size,
            "elapsed_s": round(elapsed_s, 3),
            "pictures": [
                {"file": self.files[p.index], "index": p.index, "seed": p.seed, "bytes": len(p.data)}
                for p in written
            ],
            "previews": [
                {"file": name, "index": p.index, "step": p.step, "box": p.box}
                for name, p in self.previews.items()
            ],
            "errors": [{"code": f.code, "message": f.sentence, "index": f.index} for f in failures],
        }


def write(name: str, data: bytes) -> None:
    """Write the file `name`, or to standard output."""
    with click.open_file(name, "wb") as file:
        file.write(data)
        file.flush()


@contextmanager
def writing(name: str) -> Iterator[None]:
    """The file or folder `name` is written inside.

    Raises:
        Refused: it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise RequestRefused(_not_written(name, error)) from error


def _not_written(name: str, error: OSError) -> ErrorBody:
    place = "Standard output" if name == STDOUT else name
    return ErrorBody(code=NOT_WRITTEN, message=f"{place} cannot be written: {error.strerror or error}.")


def _print_json(value: object) -> None:
    click.echo(json.dumps(value, indent=2))


_say: Final = partial(click.echo, err=True)


# What ``giornata edit`` and ``giornata generate`` have in common: their options, the door, the way of an
# order.


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
    """The values of the options that both edit commands share."""

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
    ctx.exit(terminal.run(lambda: run(opening, asked, report, sending.timeout_s, progress=shown)))


def _opening(address: str, how: EditCommandOptions) -> Opening:
    """The door at `address`, open while inside."""
    if is_web(address):
        from giornata_tools.clients.http import open_http

        return open_http(address, how.api_key)
    from giornata_tools.clients.nats import open_nats

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
        return terminal.INTERRUPTED
    return report.finished(outcome, time.monotonic() - started_s)


def _destinations(out: str, n: int, chosen: str | None) -> tuple[tuple[str, ...], OutputFormat]:
    """A file for each of `n` pictures, and their format.

    Raises:
        click.BadParameter: `out` is no name for them.
    """
    try:
        output_format = format_of(out, OutputFormat(chosen) if chosen else None)
        files = tuple(picture_files(out, n))
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


@click.command(params=options(EditParameters, output_format="what OUT ends with"))
@click.argument("image", type=SOURCE, metavar="IN")
@click.option(
    "--mask",
    type=SOURCE,
    help="What to repaint: its transparent pixels, or if it has none, white ones. Without it: those of IN, or all "
    "of an opaque IN.",
)
@sending_options
@click.pass_context
def edit(ctx: click.Context, /, *, image: str, mask: str | None, **given: Any) -> None:
    """Repaint the masked part of the picture IN as the prompt says, and write OUT.

    PNG, JPEG and WebP are read; OUT is written in the format that its name ends with. Pixels outside the mask stay
    exactly as they are in IN. `giornata models NAME` tells which of these options a served model takes.
    """
    sending, parameters, files = read_options(ctx, given, EditParameters)
    if [image, mask, *sending.references, *sending.control_images].count(STDOUT) > 1:
        raise click.UsageError("Standard input holds one picture, not several.")
    carry_out(
        ctx,
        sending,
        lambda: EditCall(read(image), None if mask is None else read(mask), parameters),
        files,
    )


sort_first(edit, "image", "prompt", "mask", "references", "control_images", "out")


@click.command(params=options(GenerationParameters, output_format="what OUT ends with"))
@sending_options
@click.pass_context
def generate(ctx: click.Context, /, **given: Any) -> None:
    """Make a picture from text, and write OUT.

    It needs a served model whose tasks name `generate`, as `giornata models` tells; any Flux text-to-image checkpoint
    is one. `giornata models NAME` tells which of these options a model takes. A Fill model edits only, and the model
    that comes with Giornata, fresco, is a Fill model: serve another with `giornata up --model FOLDER_OR_ID`.
    """
    sending, parameters, files = read_options(ctx, given, GenerationParameters)
    if [*sending.references, *sending.control_images].count(STDOUT) > 1:
        raise click.UsageError("Standard input holds one picture, not several.")
    carry_out(ctx, sending, lambda: EditCall(None, None, parameters), files)


sort_first(generate, "prompt", "references", "control_images", "out")
