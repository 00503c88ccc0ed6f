"""Processors that simulated processes share where there are fewer of them than processes. Pure."""

from __future__ import annotations

import math


class Host:
    """One machine's processors, shared evenly by all who compute; how many do is asked when something begins.

    Args:
        cores: infinite: everyone has one.
    """

    def __init__(self, cores: float = math.inf) -> None:
        self._cores, self._computing = cores, 0

    @property
    def crowded(self) -> bool:
        """Whether processes may slow each other down."""
        return math.isfinite(self._cores)

    @property
    def slowness(self) -> float:
        """By how much slower than alone one more would compute."""
        return max(1.0, (self._computing + 1) / self._cores)

    def begin(self) -> None:
        """Somebody computes."""
        self._computing += 1

    def end(self) -> None:
        """Somebody has computed."""
        self._computing -= 1
