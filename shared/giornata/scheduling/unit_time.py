"""What an amount of something takes, where it takes twice as long for twice as much. Pure."""

from __future__ import annotations

from typing import Final

KEPT: Final = 0.9
"""Of what was observed before, with every observation."""


class UnitTime:
    """All time over all amounts, both with forgetting; nothing as long as nothing was observed."""

    def __init__(self) -> None:
        self._amount = self._ms = 0.0

    def observe(self, amount: float, ms: float) -> None:
        """So much took so long."""
        self._amount = KEPT * self._amount + amount
        self._ms = KEPT * self._ms + ms

    def ms(self, amount: float) -> float:
        """What `amount` takes, or 0 where nobody knows."""
        return amount * self._ms / self._amount if self._amount else 0.0
