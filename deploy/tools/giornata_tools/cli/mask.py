"""``giornata mask``: what words name in a picture, as a mask for edits."""

from __future__ import annotations

import base64
import json
from typing import Any, Final

import click

from giornata.wire.requests import MAX_REGIONS
from giornata_tools.cli.edit import SOURCE, STDOUT, read, write, writing
from giornata_tools.cli.groups import asks_gateway
from giornata_tools.cli.options import api_key_option, url_option
from giornata_tools.clients.http import HttpClient

PATH: Final = "/v1/masks"


@click.command()
@click.argument("image", type=SOURCE, metavar="IN")
@click.argument("prompt", metavar="WORDS")
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="OUT",
    help="Where to write the mask, a PNG: white is what the words name. - is standard output.",
)
@click.option(
    "--mask-threshold",
    type=click.FloatRange(min=0, max=1, min_open=True),
    help="How sure the mask model must be of a region.  [default: the model's own]",
)
@click.option(
    "--max-regions",
    type=click.IntRange(1, MAX_REGIONS),
    help=f"How many regions are taken at most, the surest ones.  [default: {MAX_REGIONS}]",
)
@click.option(
    "--model",
    metavar="NAME",
    help="A served model, beside which the mask is made where it has a mask model.  [default: any]",
)
@url_option
@api_key_option
@click.option("--json", "as_json", is_flag=True, help="Print the regions as JSON: score, box, area.")
@asks_gateway
async def mask(gateway: HttpClient, *, image: str, out: str, as_json: bool, **given: Any) -> None:
    """Find what WORDS name in the picture IN, and write the mask OUT.

    `giornata edit IN --mask OUT` repaints it; `giornata edit --mask-prompt WORDS` does both at once.
    """
    if as_json and out == STDOUT:
        raise click.UsageError("--json and -o - both write to standard output; give one.")
    fields = {name: str(value) for name, value in given.items() if value is not None}
    told = await gateway.send_picture(PATH, read(image), fields)
    with writing(out):
        write(out, base64.b64decode(told["b64_png"]))
    regions: list[dict[str, Any]] = [
        {name: region[name] for name in ("score", "box", "area")} for region in told["regions"]
    ]
    if as_json:
        click.echo(json.dumps({"model": told["model"], "file": out, "regions": regions}))
        return
    for region in regions:
        left, top, width, height = region["box"]
        click.echo(
            f"{width}x{height} at {left},{top}: {region['area']} pixels, score {region['score']:.3f}",
            err=True,
        )
