"""Step caches: what requests may ask of them, and what models make of that. Pure.

A row with one computes fewer steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

MAX_INTERVAL: Final = 20
MAX_ORDER: Final = 3
ORDER: Final = 1
WARMUP: Final = 3
"""Order and warm-up of TaylorSeer, where a request names none: the defaults of diffusers."""
INTERVALS: Final = ((40, 5), (10, 3), (1, 2))
"""From so many steps on, TaylorSeer computes one in so many: noise levels of short runs lie further apart."""


class StepCache(StrEnum):
    """By which rule a row computes fewer steps."""

    OFF = "off"
    """It computes all blocks in every step."""
    TAYLORSEER = "taylorseer"
    """Between computed steps, the network's output is extrapolated by finite differences."""


SETTINGS: Final = ("step_cache_interval", "step_cache_order", "step_cache_warmup")
"""Fields that set TaylorSeer."""


class TaylorSeerSchedule(NamedTuple):
    """Which steps TaylorSeer computes: `TaylorSeerCacheConfig` of diffusers."""

    interval: int
    """One in so many."""
    warmup: int
    """All first steps, so many."""

    def computes(self, step: int) -> bool:
        """Whether a step is computed, 0 for the first."""
        return step < self.warmup or (step - self.warmup - 1) % self.interval == 0

    def skipped(self, steps: int) -> int:
        """How many of the first so many steps are not."""
        return sum(not self.computes(step) for step in range(steps))


def settings_of(cache: StepCache, steps: int) -> Mapping[str, int]:
    """The defaults of a cache's fields in a run of so many `steps`."""
    if cache is StepCache.OFF:
        return {}
    interval = next(interval for least, interval in INTERVALS if steps >= least)
    return dict(zip(SETTINGS, (interval, ORDER, WARMUP), strict=True))
