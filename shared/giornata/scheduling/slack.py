"""How much of its fastest rate a worker gives up for fewer rows, by the models that it serves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final

from giornata.scheduling.occupancy import Served

SLACK: Final = 0.1
"""Share of a worker's fastest rate that is given up for fewer rows, each of which then ends sooner, while none wait."""
NEARLY: Final = 1.25
"""A slack that is off by less than this factor is left as it is."""


class ModelSlack:
    """The slack of each model's workers.

    It is `most` while no rows of the model wait, half of it where half as many wait as its workers have places, and
    less the more wait. Rows of other models change nothing: these workers could not take them.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._now: dict[Served, float] = {}
        self._places = Counter[Served]()

    def count(self, models: Iterable[Served], places: int) -> None:
        """Count `places` more of workers of each of `models`, or fewer."""
        for model in models:
            self._places[model] += places

    def heed(self, waiting: Mapping[Served, int]) -> set[Served]:
        """Take in how many rows of each model wait; the models whose slack has changed."""
        changed = set()
        for model in {*waiting, *self._now}:
            slack = self._most / (1 + 2 * waiting.get(model, 0) / max(1, self._places[model]))
            before = self._now.get(model, self._most)
            if not before / NEARLY <= slack <= before * NEARLY:
                self._now[model] = slack
                changed.add(model)
        return changed

    def of(self, models: Iterable[Served]) -> float:
        """The slack of a worker of `models`: the least, since rows of any of them may go to it."""
        return min((self._now.get(model, self._most) for model in models), default=self._most)
