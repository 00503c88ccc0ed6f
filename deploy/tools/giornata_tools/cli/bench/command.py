"""``giornata bench``: measure a server from outside, or serve diffusers' own pipeline, to compare with."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import click

from giornata_tools import checkout
from giornata_tools.cli import extras
from giornata_tools.cli.bench.serve import serve
from giornata_tools.cli.options import (
    COUNT,
    device_option,
    dtype_option,
    model_option,
    torch_threads_option,
)


@click.group()
def bench() -> None:
    """Measure a server under load."""


bench.add_command(serve)


@bench.command(context_settings={"show_default": True})
@model_option(
    "A diffusers folder or a hub id.", default=str(checkout.TRAINED), show_default="the one that ships"
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
@device_option
@dtype_option
@torch_threads_option("Threads that compute.", os.cpu_count())
@click.pass_context
def baseline(ctx: click.Context, /, **given: Any) -> None:
    """Serve a checkpoint by diffusers' own pipeline with static batching, to compare with."""
    extras.require("local")
    from giornata_tools.baseline import program as server
    from giornata_tools.launcher import program

    ctx.exit(program.run("baseline", partial(server.serve, server.BaselineOptions(**given))))
