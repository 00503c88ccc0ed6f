"""``giornata bench``: measure a server from outside, or serve diffusers' own pipeline, to compare with."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import click

from giornata_lab.cli import workload
from giornata_lab.cli.bench.plan import plan_of, size
from giornata_lab.cli.bench.run import run
from giornata_lab.loadgen import workload as facts
from giornata_lab.loadgen.driver import ApiDialect
from giornata_lab.loadgen.workload import MAX_SEED, MaskShape
from giornata_tools import checkout, terminal
from giornata_tools.cli import extras, options


@click.group()
def bench() -> None:
    """Measure a server under load."""


@bench.command(context_settings={"show_default": True})
@options.url_option
@click.option("--against", metavar="URL", help="Another server, measured in turn with the same requests.")
@click.option(
    "--names", default="giornata,baseline", metavar="NAME,NAME", help="What --url and --against are called."
)
@click.option(
    "--api",
    type=click.Choice([str(api) for api in ApiDialect]),
    default=str(ApiDialect.GIORNATA),
    help="openai: only the fields of OpenAI's API; giornata: num_inference_steps and seed too.",
)
@click.option(
    "--api-key-file",
    type=options.READABLE,
    help="File that holds the key to send; by default GIORNATA_API_KEY holds it, where one is asked for.",
)
@workload.rate_option(default="1", help="Requests a second; a run for each.")
@click.option(
    "--arrivals",
    type=click.Choice(["poisson", "bursty"]),
    default="poisson",
    help="bursty: gamma-distributed times between requests.",
)
@click.option(
    "--cv",
    type=options.AT_LEAST_0,
    help=f"Of bursty arrivals: standard deviation of the times between requests over their mean.  "
    f"[default: {facts.BURSTS:g}, as in a real trace]",
    show_default=False,
)
@workload.trace_option(help=f"Replay a .csv or .jsonl file instead: {workload.TRACE}.")
@workload.speed_option
@click.option(
    "--save-trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the requests of the run, .csv or .jsonl, to replay them.",
)
@workload.duration_option(default=60.0, help="Of each run, after the warm-up.")
@workload.warmup_option(default=10.0, help="Requests due before it are sent and left out of all figures.")
@workload.masks_option
@click.option(
    "--mask-shape", type=click.Choice([str(shape) for shape in MaskShape]), default=str(MaskShape.BLOB)
)
@workload.steps_option(help="A number, production's mix, or server: the server's default.")
@workload.images_option(help="Pictures a request asks for: a number, or production's mix.")
@click.option(
    "--templates", type=options.COUNT, default=8, help="Distinct pictures, where they are generated."
)
@workload.zipf_option
@click.option(
    "--images",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Take the pictures of a folder, by name; the first is the most popular.",
)
@workload.read_option(
    "--picture-size", parse=size, default="512x512", metavar="WIDTHxHEIGHT", help="Of generated pictures."
)
@click.option(
    "--lora",
    multiple=True,
    metavar="ID",
    help="A LoRA that requests may name, the most popular first; repeatable.",
)
@workload.read_option(
    "--loras",
    parse=workload.lora_numbers,
    default="production",
    metavar="N",
    help="Of a request, of these LoRAs: a number, or GenTD26's mix.",
)
@click.option("--lora-zipf", type=options.AT_LEAST_0, default=facts.LORA_ZIPF, help="Of their popularity.")
@click.option("--prompt", default="a red star", help="Of every edit.")
@click.option("--model", help="To name to the server.")
@click.option(
    "--field", "fields", multiple=True, metavar="NAME=VALUE", help="Any other field of the form; repeatable."
)
@click.option(
    "--slo", type=options.ABOVE_0, metavar="SECONDS", help="How long an answer may take to count as goodput."
)
@click.option(
    "--in-flight",
    type=options.COUNT,
    default=1000,
    help="Most requests without an answer; others are errors.",
)
@click.option(
    "--timeout", type=options.ABOVE_0, default=600.0, metavar="SECONDS", help="Longest wait for an answer."
)
@click.option("--seed", type=click.IntRange(0, MAX_SEED), default=0, help="Of everything that is drawn.")
@options.folder_option("-o", "--out", default=Path("out/serve"), help="Where report and charts are written.")
@click.pass_context
def serve(ctx: click.Context, /, **given: Any) -> None:
    """Send each edit when it is due, answered or not the ones before, and measure.

    Latencies count from when a request was due. A table is printed; FOLDER gets report.json, with every request, and
    charts. Ctrl-C ends the measurement and reports what there is.
    """
    extras.require("bench", "lab")
    plan = plan_of(given, options.typed(ctx))
    ctx.exit(terminal.run(lambda: run(plan)))


@bench.command(context_settings={"show_default": True})
@options.model_option(
    "A diffusers folder or a hub id.", default=str(checkout.TRAINED), show_default="the one that ships"
)
@click.option("--host", default="127.0.0.1")
@click.option("--port", type=int, default=8100, help="0 takes any free one.")
@click.option("--batch", type=options.COUNT, default=8, metavar="N", help="Most pictures of a batch.")
@click.option(
    "--window-ms",
    type=float,
    default=100.0,
    metavar="MS",
    help="Longest wait of a picture for others, while the pipeline is free.",
)
@click.option("--queue", type=options.COUNT, default=1000, metavar="N", help="Most pictures that wait.")
@options.device_option
@options.dtype_option
@options.torch_threads_option("Threads that compute.", os.cpu_count())
@click.pass_context
def baseline(ctx: click.Context, /, **given: Any) -> None:
    """Serve a checkpoint by diffusers' own pipeline with static batching, to compare with."""
    extras.require("local", "lab")
    from giornata_lab.baseline import server
    from giornata_tools.launcher import up

    ctx.exit(up.run("baseline", partial(server.serve, server.BaselineOptions(**given))))
