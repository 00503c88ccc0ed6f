"""``giornata bench baseline``: a server of diffusers' own pipeline, to compare with."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click

from giornata_tools import checkout
from giornata_tools.cli import extras
from giornata_tools.cli.bench.workload_options import COUNT


@click.command(context_settings={"show_default": True})
@click.option(
    "--model",
    default=str(checkout.TRAINED),
    envvar="GIORNATA_MODEL",
    show_envvar=True,
    show_default="the one that ships",
    help="A diffusers folder or a hub id.",
)
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int, default=8100, help="0 takes any free one.")
@click.option("--batch", type=COUNT, default=8, metavar="N", help="Most pictures of a batch.")
@click.option(
    "--window-ms",
    type=float,
    default=100.0,
    metavar="MS",
    help="Longest wait of a picture for others, while the pipeline is free.",
)
@click.option("--queue", type=COUNT, default=1000, metavar="N", help="Most pictures that wait.")
@click.option("--device", default="auto", help="auto, cpu, cuda or cuda:N.")
@click.option(
    "--dtype",
    default="auto",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    help="auto: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option(
    "--torch-threads", type=COUNT, default=os.cpu_count(), metavar="N", help="Threads that compute."
)
@click.pass_context
def baseline(ctx: click.Context, /, **given: Any) -> None:
    """Serve a checkpoint by diffusers' own pipeline with static batching, to compare with."""
    extras.require("local")
    from giornata_tools.baseline.server import BaselineOptions, serve
    from giornata_tools.launcher import program

    ctx.exit(program.run("baseline", partial(serve, BaselineOptions(**given))))
