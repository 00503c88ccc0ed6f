"""How the options of ``giornata bench serve`` are read; what is no such value raises ValueError. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_tools.loadgen import facts
from giornata_tools.loadgen.distributions import Mix

PRODUCTION: Final = "production"
SERVER: Final = "server"
OWN: Final = ("image", "mask", "n", "num_inference_steps", "prompt", "seed")
"""Fields that options of their own stand for, or that requests differ in."""
SIDES: Final = range(16, 4097)
"""Accepted width and height of a generated picture, in pixels."""


@dataclass(frozen=True)
class Given:
    """An option's value."""

    text: str
    """The text that was typed."""
    value: Any

    def __str__(self) -> str:
        return self.text


def read_by(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, str], Given]:
    """A callback of an option whose value `parse` reads; its mistakes are told as the option's."""

    def callback(_: click.Context, __: click.Parameter, text: str) -> Given:
        try:
            return Given(text, parse(text))
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def rates(text: str) -> list[float]:
    """One rate, or several with commas between them, each once."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < rate <= 1e5 for rate in found):
        raise ValueError(f"{text} is no rate above 0, such as 0.5, nor several, such as 0.5,1,2")
    return list(dict.fromkeys(found))


def mask_ratios(text: str) -> Sequence[float]:
    """Percentiles of a trace by its name, or a ratio above 0 and up to 1, as often as percentiles need."""
    if text in facts.MASK_RATIOS:
        return facts.MASK_RATIOS[text]
    try:
        ratio = float(text)
    except ValueError:
        ratio = 0.0
    if not 0 < ratio <= 1:
        raise ValueError(
            f"{text} is neither a ratio above 0 and up to 1 nor one of {', '.join(facts.MASK_RATIOS)}"
        )
    return (ratio, ratio)


def steps(text: str) -> Mix | None:
    """Production's step counts, one for all, or None where the server is to choose."""
    return None if text == SERVER else _mix(text, facts.STEPS, MAX_STEPS, f"{PRODUCTION} or {SERVER}")


def images(text: str) -> Mix:
    """Production's pictures a request, or one number for all."""
    return _mix(text, facts.IMAGES, MAX_IMAGES, PRODUCTION)


def size(text: str) -> tuple[int, int]:
    """WIDTHxHEIGHT in pixels."""
    found = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    sides = tuple(map(int, found.groups())) if found else ()
    if not sides or not all(side in SIDES for side in sides):
        raise ValueError(f"{text} is no size such as 512x512, of sides from {SIDES[0]} to {SIDES[-1]} pixels")
    return sides[0], sides[1]


def fields(texts: Sequence[str]) -> dict[str, str]:
    """NAME=VALUE of each of `texts`."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"\w+", name):
            raise ValueError(f"{text} is not of the form NAME=VALUE")
        if name in OWN or name in found:
            raise ValueError(f"{name} is set twice, or has an option of its own; set other fields, each once")
        found[name] = value
    return found


def _mix(text: str, production: Mix, most: int, names: str) -> Mix:
    if text == PRODUCTION:
        return production
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"{text} is neither a number from 1 to {most} nor {names}")
    return {int(text): 1.0}
