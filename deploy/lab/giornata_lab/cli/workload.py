"""Options of ``giornata bench serve`` and ``giornata simulate`` that say which edits arrive, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from giornata.wire.adapters import MAX_LORAS
from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import Mix
from giornata_tools.cli.options import ABOVE_0, AT_LEAST_0, Option
from giornata_tools.terminal import drawn

PRODUCTION: Final = "production"
SERVER: Final = "server"


@dataclass(frozen=True)
class ParsedOption:
    """What was typed, and what is read there."""

    text: str
    value: Any

    def __str__(self) -> str:
        return self.text


def read_option(*names: str, parse: Callable[[str], Any], **settings: Any) -> Option:
    """An option whose value `parse` reads, as `ParsedOption`; its ValueErrors are told as the option's mistakes."""

    def callback(_: click.Context, __: click.Parameter, text: str) -> ParsedOption:
        try:
            return ParsedOption(text, parse(text))
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return click.option(*names, callback=callback, **settings)


def rates(text: str) -> list[float]:
    """One rate, or several with commas between them, each once.

    Raises:
        ValueError: as of all that read an option here, it is no such value.
    """
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate <= 1e5 for rate in found):
        raise ValueError(f"{text} is no rate above 0, such as 0.5, nor several, such as 0.5,1,2")
    return list(dict.fromkeys(found))


def mask_ratios(text: str) -> Sequence[float]:
    """Percentiles of a trace by its name, or a ratio above 0 and up to 1, as often as percentiles need."""
    if text in workload.MASK_RATIOS:
        return workload.MASK_RATIOS[text]
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(
            f"{text} is neither a ratio above 0 and up to 1 nor one of {', '.join(workload.MASK_RATIOS)}"
        )
    return (ratio, ratio)


def steps(text: str) -> Mix | None:
    """Production's step counts, one for all, or None where the server is to choose."""
    return None if text == SERVER else _mix(text, workload.STEPS, MAX_STEPS, f"{PRODUCTION} or {SERVER}")


def images(text: str) -> Mix:
    """Production's pictures a request, or one number for all."""
    return _mix(text, workload.IMAGES, MAX_IMAGES, PRODUCTION)


def lora_numbers(text: str) -> Mix:
    """GenTD26's numbers of LoRAs a request, or one for all."""
    return _mix(text, workload.ADAPTERS["gentd26"]["loras"], MAX_LORAS, PRODUCTION)


def _mix(text: str, production: Mix, most: int, names: str) -> Mix:
    if text == PRODUCTION:
        return production
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"{text} is neither a number from 1 to {most} nor {names}")
    return {int(text): 1.0}


rate_option = partial(read_option, "--rate", parse=rates, metavar="RATE[,RATE...]")
trace_option = partial(
    click.option, "--trace", type=click.Path(exists=True, readable=True, path_type=Path), metavar="FILE"
)
TRACE: Final = "timestamp, and where they are known mask_ratio, steps, template, n, adapters"
"""Columns of a trace."""
cv_option = click.option(
    "--cv",
    type=AT_LEAST_0,
    default=1.0,
    help="Of the times between arrivals: standard deviation over mean; 1 is Poisson, a real trace has "
    f"{workload.BURSTS:g}.",
)
speed_option = click.option(
    "--speed", type=ABOVE_0, default=1.0, help="Replay a trace so many times as fast."
)
duration_option = partial(click.option, "--duration", type=ABOVE_0, metavar="SECONDS")
warmup_option = partial(click.option, "--warmup", type=AT_LEAST_0, metavar="SECONDS")
masks_option = read_option(
    "--masks",
    parse=mask_ratios,
    default=PRODUCTION,
    metavar="RATIO|TRACE",
    help=f"Share of the picture to repaint: a number, or as in {', '.join(workload.MASK_RATIOS)}.",
)
steps_option = partial(read_option, "--steps", parse=steps, default=PRODUCTION, metavar="STEPS")
images_option = partial(read_option, "-n", "n", parse=images, default="1", metavar="N")
zipf_option = click.option("--zipf", type=AT_LEAST_0, default=workload.ZIPF, help="Of their popularity.")


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar; call what it yields with how many of `total` are done."""
    with drawn(what, total) as update:
        yield lambda done: update(done, total, what) if update else None
