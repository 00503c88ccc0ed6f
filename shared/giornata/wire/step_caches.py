"""Step caches: what requests may ask of them, and what models make of that. Pure.

A row with one computes fewer blocks: those behind the first one are skipped, or whole steps are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

MAX_INTERVAL: Final = 20
MAX_ORDER: Final = 3
THRESHOLD: Final = 0.1
"""Threshold of the first-block cache, where a request names none."""
ORDER: Final = 1
WARMUP: Final = 3
"""Order and warm-up of TaylorSeer, where a request names none: the defaults of diffusers."""
INTERVALS: Final = ((40, 5), (10, 3), (1, 2))
"""From so many steps on, TaylorSeer computes one in so many: noise levels of short runs lie further apart."""


class StepCache(StrEnum):
    """By which rule a row computes fewer blocks."""

    OFF = "off"
    """It computes all blocks in every step."""
    FIRST_BLOCK = "first-block"
    """Blocks behind the first one are skipped where that adds nearly what it added when they were last computed."""
    TAYLORSEER = "taylorseer"
    """Between computed steps, the network's output is extrapolated by finite differences."""


SETTINGS: Final[Mapping[str, StepCache]] = {
    "step_cache_threshold": StepCache.FIRST_BLOCK,
    "step_cache_interval": StepCache.TAYLORSEER,
    "step_cache_order": StepCache.TAYLORSEER,
    "step_cache_warmup": StepCache.TAYLORSEER,
}
"""Fields that set a cache, and which one."""


class Extrapolation(NamedTuple):
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


def settings_of(cache: StepCache, steps: int) -> Mapping[str, float | int]:
    """The defaults of a cache's fields in a run of so many `steps`."""
    if cache is StepCache.FIRST_BLOCK:
        return {"step_cache_threshold": THRESHOLD}
    if cache is StepCache.TAYLORSEER:
        interval = next(interval for least, interval in INTERVALS if steps >= least)
        return {
            "step_cache_interval": interval,
            "step_cache_order": ORDER,
            "step_cache_warmup": WARMUP,
        }
    return {}


def set_for(field: str, value: float | None, cache: StepCache | None) -> None:
    """Raise ValueError where a request sets `field` of another cache than the one that it asks for.

    `cache` is None where the request's own is no cache, which is told by itself.
    """
    if value is not None and cache not in {None, SETTINGS[field]}:
        raise ValueError(f"needs step_cache {SETTINGS[field]}")
