"""Which noise levels and blocks a template keeps within a budget of bytes. Pure.

Noise levels cost little to drop, down to a few: the next nearest serves as well. Of the blocks the first ones are
dropped: a step that computes them in full still has the outside tokens' hidden state, which nothing has to load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LEAST_LEVELS: Final = 4
"""Below this many recorded noise levels the picture suffers."""


@dataclass(frozen=True)
class Keeping:
    """What a template run keeps."""

    levels: int
    """Noise levels."""
    first_block: int
    """Blocks before it keep nothing and are computed in full; it is the number of blocks where none is kept."""


def within(
    budget_bytes: int | None,
    *,
    levels: int,
    blocks: int,
    block_bytes: int,
    least_levels: int = LEAST_LEVELS,
) -> Keeping:
    """The most that fits: first all blocks at fewer levels, then fewer blocks.

    Args:
        budget_bytes: limit of one template; None for no limit.
        levels: wanted noise levels.
        blocks: blocks of the transformer.
        block_bytes: bytes that one block keeps at one noise level.
        least_levels: fewer levels are kept only where fewer are wanted.
    """
    if budget_bytes is None:
        return Keeping(levels, 0)
    slots = budget_bytes // max(1, block_bytes)
    kept = min(levels, max(slots // blocks, min(levels, least_levels)))
    return Keeping(kept, blocks - min(blocks, slots // kept))
