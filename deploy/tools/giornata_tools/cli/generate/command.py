"""``giornata generate``: pictures from text, their progress, their files; Ctrl-C cancels them."""

from __future__ import annotations

from typing import Any

import click

from giornata.wire.requests import GenerationParameters
from giornata_tools.cli.edit.order import STDOUT, carry_out, read_options, sending_options
from giornata_tools.cli.edit.parameters import options, sort_first
from giornata_tools.clients.edits import EditCall


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
