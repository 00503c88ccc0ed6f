"""Options of commands that say what edits arrive: of ``giornata bench serve`` and ``giornata simulate``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from giornata_tools.cli.bench import values as bench_values
from giornata_tools.loadgen import facts

ABOVE_0: Final = click.FloatRange(min=0, min_open=True)
AT_LEAST_0: Final = click.FloatRange(min=0)
COUNT: Final = click.IntRange(min=1)
READABLE: Final = click.Path(exists=True, dir_okay=False, readable=True, path_type=Path)

Option = Callable[[Callable[..., Any]], Callable[..., Any]]

speed_option: Final = click.option(
    "--speed", type=ABOVE_0, default=1.0, help="Replay a trace so many times as fast."
)
masks_option: Final = click.option(
    "--masks",
    default=bench_values.PRODUCTION,
    metavar="RATIO|TRACE",
    callback=bench_values.read_by(bench_values.mask_ratios),
    help=f"Share of the picture to repaint: a number, or as in {', '.join(facts.MASK_RATIOS)}.",
)
zipf_option: Final = click.option("--zipf", type=AT_LEAST_0, default=facts.ZIPF, help="Of their popularity.")


def rate_option(default: str, text: str) -> Option:
    """One rate or several."""
    return click.option(
        "--rate",
        default=default,
        metavar="RATE[,RATE...]",
        callback=bench_values.read_by(bench_values.rates),
        help=text,
    )


def trace_option(text: str) -> Option:
    """A recorded workload."""
    columns = "timestamp, and where they are known mask_ratio, steps, template, n"
    return click.option("--trace", type=READABLE, metavar="FILE", help=f"{text}: {columns}.")


def duration_option(default: float, text: str) -> Option:
    """How long a run takes."""
    return click.option("--duration", type=ABOVE_0, default=default, metavar="SECONDS", help=text)


def warmup_option(default: float, text: str) -> Option:
    """How long a run's beginning takes, which is not counted."""
    return click.option("--warmup", type=AT_LEAST_0, default=default, metavar="SECONDS", help=text)


def steps_option(text: str) -> Option:
    """Denoising steps of an edit."""
    return click.option(
        "--steps",
        default=bench_values.PRODUCTION,
        metavar="STEPS",
        callback=bench_values.read_by(bench_values.steps),
        help=text,
    )


def images_option(what: str) -> Option:
    """How many pictures an edit asks for."""
    return click.option(
        "-n",
        "n",
        default="1",
        metavar="N",
        callback=bench_values.read_by(bench_values.images),
        help=f"Pictures a {what} asks for: a number, or production's mix.",
    )
