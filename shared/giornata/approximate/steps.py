"""After which steps a row's latent is kept, and how many steps a share of them is."""

from __future__ import annotations

from typing import Final

SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5)
"""Shares of a row's steps after which its latent is kept: Nirvana's 5 to 25 of 50 (§5.1)."""
_ROUNDING: Final = 1e-9
"""Makes the share k / n of n steps k again."""


def step_of(share: float, steps: int) -> int:
    """The last whole step within a share of so many."""
    return int(share * steps + _ROUNDING)


def kept_steps(steps: int) -> tuple[int, ...]:
    """After how many of a row's steps its latent is kept, ascending; empty where a step is more than half of them."""
    found = {step_of(share, steps) for share in SHARES}
    return tuple(sorted(found - {0}))
