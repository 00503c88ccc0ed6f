"""What the benchmarks serve: edits with masks, step counts and templates as in production, and when they arrive. Pure.

The figures are in ``workload_facts.json``, with their source.
"""

from __future__ import annotations

import json
import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

FACTS: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("workload_facts.json").read_text(encoding="utf-8")
)
PERCENTILES: Final[Sequence[float]] = FACTS["mask_ratio_percentiles"]["production_templates"]
ZIPF: Final = float(FACTS["template_zipf_exponent"])

Mix = Mapping[int, float]
"""Weights by value; they need not sum to 1."""

MIXES: Final[Mapping[str, Mix]] = {
    "production": {int(steps): weight for steps, weight in FACTS["steps"].items()},
    "8/20/28/50": dict.fromkeys((8, 20, 28, 50), 1.0),
}
"""Step counts of requests."""
IMAGES: Final[Mapping[str, Mix]] = {
    "one": {1: 1.0},
    "production": {int(images): weight for images, weight in FACTS["images_per_request"].items()},
}
"""Pictures a request asks for."""


@dataclass(frozen=True)
class Edit:
    """One row that is to be served."""

    index: int
    template: int
    ratio: float
    """Of the mask to the picture."""
    top: float
    left: float
    """Where the square mask lies: shares of the room that it leaves."""
    steps: int


@dataclass(frozen=True)
class Arrival:
    """One request."""

    at_s: float
    edits: tuple[Edit, ...]


def at_percentile(table: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of a distribution lies; straight lines between those of `table`."""
    place = share * (len(table) - 1)
    lower = min(int(place), len(table) - 2)
    return table[lower] + (place - lower) * (table[lower + 1] - table[lower])


def chosen(mix: Mix, share: float) -> int:
    """The value of `mix` at `share` (0..1) of its weight, values in ascending order."""
    values = sorted(mix)
    sums = list(accumulate(mix[value] for value in values))
    return values[min(bisect(sums, share * sums[-1]), len(values) - 1)]


def zipf(count: int, exponent: float = ZIPF) -> Mix:
    """Popularity of `count` templates: the weight of number i is (i + 1)^-exponent."""
    return {index: exp(-exponent * log(index + 1)) for index in range(count)}


def edits(count: int, mix: Mix, *, templates: int, seed: int, divide: int = 1) -> list[Edit]:
    """`count` edits whose mask ratios and step counts follow production even where they are few.

    Stratified: one edit of each of `count` equal shares of both distributions, paired and ordered by chance.

    Args:
        count: of edits.
        mix: of step counts.
        templates: whose popularity follows Zipf's law.
        seed: of chance.
        divide: step counts by this, at least to 1.
    """
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    shares = [(place + 0.5) / count for place in range(count)]
    ratios = [at_percentile(PERCENTILES, share) for share in shares]
    steps = [max(1, round(chosen(mix, share) / divide)) for share in shares]
    chance.shuffle(ratios)
    chance.shuffle(steps)
    popular = zipf(templates)
    return [
        Edit(index, chosen(popular, chance.random()), ratio, chance.random(), chance.random(), many)
        for index, (ratio, many) in enumerate(zip(ratios, steps, strict=True))
    ]


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times below `seconds` of a Poisson process of `rate` a second."""
    chance = random.Random(seed)  # noqa: S311 - likewise
    times: list[float] = []
    now = chance.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += chance.expovariate(rate)
    return times


def arrivals(times: Sequence[float], of: Sequence[Edit], images: Mix, seed: int) -> list[Arrival]:
    """A request at each of `times`: one edit of `of`, in order and again from the first, in some pictures of `images`.

    Pictures of one request share template, mask and step count.
    """
    chance = random.Random(seed)  # noqa: S311 - likewise
    found: list[Arrival] = []
    index = 0
    for number, at_s in enumerate(times):
        edit, many = of[number % len(of)], chosen(images, chance.random())
        rows = tuple(
            Edit(index + place, edit.template, edit.ratio, edit.top, edit.left, edit.steps)
            for place in range(many)
        )
        found.append(Arrival(at_s, rows))
        index += many
    return found


def square(edit: Edit, side: int) -> Tensor:
    """(side, side) bool, in tokens: the edit's mask, the square next to its ratio, of one token at least."""
    width = min(side, max(1, round(side * edit.ratio**0.5)))
    top, left = (round(share * (side - width)) for share in (edit.top, edit.left))
    touched = torch.zeros(side, side, dtype=torch.bool)
    touched[top : top + width, left : left + width] = True
    return touched


def token_limit(text: int, tokens: int, computed: Sequence[int]) -> float:
    """(T + L) / (T + M) of several edits: tokens in full over tokens computed, text included, halo counted in M.

    Args:
        text: tokens of each edit's prompt.
        tokens: of each edit's picture.
        computed: of each edit's picture, with the halo.
    """
    return len(computed) * (text + tokens) / sum(text + own for own in computed)
