"""Drawing from distributions that are known by percentiles or by weights. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
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
