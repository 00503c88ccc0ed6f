"""After which steps a row is shown. Pure."""

from __future__ import annotations


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """After how many of `steps` a row is shown: `count` times, evenly spread, fewer where there are fewer steps.

    Never after the last step, since the picture itself follows, and never twice after one.
    """
    shown = min(count, steps - 1)
    parts = shown + 1
    return tuple((2 * i * steps + parts) // (2 * parts) for i in range(1, parts))
