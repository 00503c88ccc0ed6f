"""Drawing from distributions: those known by percentiles or by weights, and times of arrival. Pure."""

from __future__ import annotations

import random
from bisect import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, log

Mix = Mapping[int, float]
"""Weights by value; they need not sum to 1."""


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


def zipf(count: int, exponent: float) -> Mix:
    """Popularity of `count` templates: the weight of number i is (i + 1)^-exponent."""
    return {index: exp(-exponent * log(index + 1)) for index in range(count)}


def arrival_times(rate: float, seconds: float, seed: int, cv: float = 1.0) -> list[float]:
    """Times below `seconds` of a renewal process of `rate` a second.

    The times between arrivals follow a gamma distribution: a Poisson process where its coefficient of variation `cv` is
    1, bursts above, evenly spaced at 0.

    Raises:
        ValueError: `rate` or `cv` is out of range.
    """
    if rate <= 0 or cv < 0:
        raise ValueError(f"a rate is above 0 and a cv 0 or more; received {rate:g} and {cv:g}")
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    shape = cv**-2 if cv else 0.0
    times: list[float] = []
    now = 0.0
    while True:
        now += chance.gammavariate(shape, 1 / (shape * rate)) if cv else 1 / rate
        if now >= seconds:
            return times
        times.append(now)


@dataclass(frozen=True)
class ArrivalBursts:
    """Times in which requests are `factor` times as dense: each lasts `lasts_s`, `every_s` passes to the next one."""

    factor: float = 5.0
    lasts_s: float = 45.0
    every_s: float = 900.0
    """On average, from the end of one to the next one's start; exponentially distributed."""


def crowded_times(rate: float, seconds: float, seed: int, crowds: ArrivalBursts) -> list[float]:
    """Times below `seconds` of a Poisson process that is denser in crowds; `rate` a second is its mean over all.

    Raises:
        ValueError: `rate`, or what `crowds` say, is out of range.
    """
    if crowds.factor < 1 or crowds.lasts_s <= 0 or crowds.every_s <= 0:
        raise ValueError(f"a crowd has a factor of 1 or more and lasts longer than 0; received {crowds}")
    chance = random.Random(f"{seed} crowds")  # noqa: S311 - a workload, no secret
    usual = rate / (1 + (crowds.factor - 1) * crowds.lasts_s / (crowds.lasts_s + crowds.every_s))
    starts, at_s = list[float](), chance.expovariate(1 / crowds.every_s)
    while at_s < seconds:
        starts.append(at_s)
        at_s += crowds.lasts_s + chance.expovariate(1 / crowds.every_s)

    def dense(now: float) -> bool:
        place = bisect(starts, now)
        return place > 0 and now < starts[place - 1] + crowds.lasts_s

    times = arrival_times(usual * crowds.factor, seconds, seed)
    return [now for now in times if dense(now) or chance.random() < 1 / crowds.factor]
