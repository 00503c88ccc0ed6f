"""``giornata edit``: one edit, its progress, its pictures; Ctrl-C cancels it."""

from __future__ import annotations

from typing import Any

import click

from giornata.wire.requests import EditParameters
from giornata_tools.cli.edit.order import SOURCE, STDOUT, carry_out, read, read_options, sending_options
from giornata_tools.cli.edit.parameters import options, sort_first
from giornata_tools.clients.edits import EditCall


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
