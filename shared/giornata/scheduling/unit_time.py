"""Time that grows with an amount, learnt with forgetting. Pure."""

from __future__ import annotations

from typing import Final

KEPT: Final = 0.9
"""Weight of all earlier observations at each new one."""


class UnitTime:
    """Time that grows in proportion to an amount: total time over total amount, both with forgetting.

    It begins as if `amount` had taken `ms`: small ones give way to the first observation.
    """

    def __init__(self, amount: float = 0.0, ms: float = 0.0) -> None:
        self._amount, self._ms = amount, ms

    def observe(self, amount: float, ms: float) -> None:
        """Take in that `amount` took `ms`."""
        self._amount = KEPT * self._amount + amount
        self._ms = KEPT * self._ms + ms

    def ms(self, amount: float) -> float:
        """Time that `amount` takes; 0 before the first observation."""
        return amount * self._ms / self._amount if self._amount else 0.0


LINE_KEPT: Final = 0.97
"""Weight of all earlier observations at each new one, where a line has two numbers to learn."""
APART: Final = 1e-3
"""Least variation of amounts, squared, for which a line is drawn through them."""


class LinearTimeModel:
    """Time that an amount takes, with a part that every amount takes: least squares with forgetting.

    Neither part is negative. Before the first observation it takes `unit_ms` for each unit; where all amounts were
    about the same, time is in proportion to them.
    """

    def __init__(self, unit_ms: float) -> None:
        self._unit_ms = unit_ms
        self._weight = self._amount = self._squared = self._ms = self._product = 0.0
        """Sums over observations: of their weights, and weighted."""
        self._fitted: tuple[float, float] = (0.0, unit_ms)
        """The part that every amount takes, and that of a unit."""

    def observe(self, amount: float, ms: float) -> None:
        """Take in that `amount` took `ms`."""
        self._weight = LINE_KEPT * self._weight + 1.0
        self._amount = LINE_KEPT * self._amount + amount
        self._squared = LINE_KEPT * self._squared + amount * amount
        self._ms = LINE_KEPT * self._ms + ms
        self._product = LINE_KEPT * self._product + amount * ms
        self._fitted = self._fit()

    def ms(self, amount: float) -> float:
        """Time that `amount` takes."""
        fixed_ms, unit_ms = self._fitted
        return fixed_ms + amount * unit_ms

    def _fit(self) -> tuple[float, float]:
        mean, mean_ms = self._amount / self._weight, self._ms / self._weight
        variance = self._squared / self._weight - mean * mean
        if mean <= 0:
            return mean_ms, self._unit_ms
        if variance <= APART * mean * mean:
            return 0.0, mean_ms / mean
        unit_ms = max(0.0, (self._product / self._weight - mean * mean_ms) / variance)
        fixed_ms = mean_ms - unit_ms * mean
        return (fixed_ms, unit_ms) if fixed_ms >= 0 else (0.0, mean_ms / mean)
