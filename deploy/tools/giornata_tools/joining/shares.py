"""Which steps are tried, and how late a LoRA may join after what was seen. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from skimage.metrics import structural_similarity

Pixels = NDArray[np.uint8]
"""(height, width, 3)."""
LEAST_SSIM: Final = 0.95
"""Mean over the probes, of each picture in its mask's box beside the picture that has the LoRA in every step."""
SURELY: Final = 2.0
"""Standard errors by which the mean exceeds it: of other pictures, the mean is then below it in 2 cases of 100."""
FINE: Final = 5
"""Steps up to which each is tried."""
GROWTH: Final = 1.25
"""Beyond `FINE`, each step that is tried is so many times the one before."""


@dataclass(frozen=True)
class JoinStepTrial:
    """Pictures whose LoRA joined after `step` steps of `steps`."""

    step: int
    steps: int
    ssims: tuple[float, ...]
    """SSIM of each probe, in the mask's box."""

    @property
    def share(self) -> float:
        """Share of the steps after which the LoRA joined."""
        return self.step / self.steps

    @property
    def least(self) -> float:
        """SSIM of the probe that is least alike."""
        return min(self.ssims)

    @property
    def mean(self) -> float:
        """Mean SSIM of the probes."""
        return statistics.fmean(self.ssims)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 of a single probe, which tells none."""
        n = len(self.ssims)
        return statistics.stdev(self.ssims) / math.sqrt(n) if n > 1 else 0.0

    @property
    def alike(self) -> bool:
        """Whether pictures are like those with the LoRA in every step, and not by the chance of few probes."""
        return self.mean - SURELY * self.error >= LEAST_SSIM


def candidates(steps: int, at_most: float) -> Iterator[int]:
    """Steps to try, from the first on, none above the share `at_most` of `steps` and none that is the last.

    Every one up to `FINE`, then fewer: a share that lies between two of them is taken for the lower one.
    """
    step = 1
    while step < steps and step <= at_most * steps:
        yield step
        step = step + 1 if step < FINE else max(step + 1, int(step * GROWTH))


def joins_within(tried: Sequence[JoinStepTrial]) -> float:
    """The largest share of the steps up to which all that was `tried`, in rising order, is alike; 0 where none is.

    What is alike again after one that is not is chance, and does not count.
    """
    share = 0.0
    for one in tried:
        if not one.alike:
            break
        share = one.share
    return share


def ssim(one: Pixels, other: Pixels, where: NDArray[np.bool_] | None = None) -> float:
    """Mean structural similarity (Wang et al., 2004; windows of 7 pixels) over `where`, default all."""
    mean, every = structural_similarity(one, other, channel_axis=2, full=True)
    return float(mean if where is None else every[where].mean())
