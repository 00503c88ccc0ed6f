"""Time in proportion to an amount, learnt with forgetting. Pure."""

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
