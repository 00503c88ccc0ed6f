"""``giornata edit``: one edit, its progress, its pictures; Ctrl-C cancels it."""

from __future__ import annotations

from typing import Any, Final

import click

from giornata.wire.requests import EditParameters
from giornata_tools.cli.edit.carrying import carry_out, read_options, sending_options
from giornata_tools.cli.edit.delivery import STDOUT
from giornata_tools.cli.edit.parameters import options, sort_first
from giornata_tools.doors.edits import EditCall

SOURCE: Final = click.Path(exists=True, dir_okay=False, readable=True, allow_dash=True)


@click.command(params=options(EditParameters, output_format="what OUT ends with"))
@click.argument("image", type=SOURCE, metavar="IN")
@click.option(
    "--mask",
    type=SOURCE,
    help="What to repaint, white or transparent. Without it: the transparent part of IN, or all of an opaque one.",
)
@sending_options
@click.pass_context
def edit(ctx: click.Context, /, *, image: str, mask: str | None, **given: Any) -> None:
    """Repaint the masked part of the picture IN as the prompt says, and write OUT.

    PNG, JPEG and WebP are read; OUT is written in the format that its name ends with. Pixels outside the mask stay
    exactly as they are in IN. `giornata models NAME` tells which of these options a served model takes.
    """
    sending, parameters, files = read_options(ctx, given, EditParameters)
    if image == mask == STDOUT:
        raise click.UsageError("Standard input holds one picture, not IN and the mask.")
    carry_out(
        ctx,
        sending,
        lambda: EditCall(_read(image), None if mask is None else _read(mask), parameters),
        files,
    )


sort_first(edit, "image", "prompt", "mask", "out")


def _read(name: str) -> bytes:
    with click.open_file(name, "rb") as file:
        return bytes(file.read())
