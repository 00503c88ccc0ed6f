"""A row's way through the noise levels, made once by its family's schedule."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Track:
    """The steps of one row, from its first to its last. All tensors are float32 on the CPU."""

    times: Tensor
    """(steps,): what the network is told before each step."""
    levels: Tensor
    """(steps + 1,): the noise level before each step and after the last one, falling from at most 1 to 0."""
    numbers: Tensor
    """(steps + 1, n): what the schedule's own rules read at each level; only the schedule knows their meaning."""

    @property
    def steps(self) -> int:
        """Steps that are computed."""
        return len(self.times)


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """After how many computed steps a row is shown: `count` times, evenly spread, fewer where there are fewer steps.

    Never after the last step, since the picture itself follows, and never twice after one.

    Args:
        steps: that are computed, at least 1.
        count: previews asked for, 0 or more.
    """
    shown = min(count, steps - 1)
    parts = shown + 1
    return tuple((2 * i * steps + parts) // (2 * parts) for i in range(1, parts))
