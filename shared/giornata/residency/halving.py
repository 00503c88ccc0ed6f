"""Counts that halve as time goes by. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator


class HalvedCounts:
    """Times may be seconds or anything else that never goes back.

    Args:
        half_life: after which a count is half of what it was.
        remembered: most names that are known, those that were counted last; None: all.
    """

    def __init__(self, half_life: float, remembered: int | None = None) -> None:
        self._half_life, self._remembered = half_life, remembered
        self._counted: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """What a name counted when it was counted last, and when that was; the latest last."""

    def __iter__(self) -> Iterator[str]:
        """Names, the one that was counted last at the end."""
        return iter(self._counted)

    def add(self, name: str, now: float) -> None:
        """Count `name` once more."""
        self._counted[name] = 1.0 + self.at(name, now), now
        self._counted.move_to_end(name)
        if self._remembered is not None and len(self._counted) > self._remembered:
            self._counted.popitem(last=False)

    def at(self, name: str, now: float) -> float:
        """What `name` counts; 0 where it is not known."""
        counted, at = self._counted.get(name, (0.0, now))
        return float(counted * 0.5 ** ((now - at) / self._half_life))

    def copy(self) -> HalvedCounts:
        """The same counts, which then go their own way."""
        made = HalvedCounts(self._half_life, self._remembered)
        made._counted = self._counted.copy()
        return made
