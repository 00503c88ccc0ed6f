"""Whether what a system holds stays flat under constant load. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

SHARE: Final = 0.15
"""Growth between the second quarter of a run and its last one that is noise."""
LEAST: Final = {"MiB": 24.0, "files": 16.0, "threads": 8.0, "": 40.0}
"""Likewise, by unit, the last token of a measure's name."""


@dataclass(frozen=True)
class Sample:
    """What everything holds at one moment."""

    at_s: float
    """Since the load began."""
    values: Mapping[str, float]
    """By measure, such as ``router-1 memory, MiB``."""


@dataclass(frozen=True)
class Trend:
    """How one measure has changed."""

    measure: str
    early: float
    """Median of the second quarter of the run; the first one fills caches."""
    late: float
    """Median of the last quarter."""
    most: float

    @property
    def flat(self) -> bool:
        """Return whether it has not grown by more than noise."""
        unit = self.measure.rpartition(", ")[2] if ", " in self.measure else ""
        return self.late - self.early <= max(SHARE * self.early, LEAST[unit])


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """The trend of every measure that was there from the second quarter to the end, by name.

    Raises:
        ValueError: there are fewer samples than two a quarter.
    """
    if len(samples) < 8:
        raise ValueError(f"a trend takes at least 8 samples, received {len(samples)}")
    quarter = len(samples) // 4
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    return [
        Trend(
            name,
            early=median(sample.values[name] for sample in early if name in sample.values),
            late=median(sample.values[name] for sample in late if name in sample.values),
            most=max(sample.values.get(name, 0.0) for sample in samples),
        )
        for name in sorted({name for sample in early for name in sample.values} & set(late[-1].values))
    ]
