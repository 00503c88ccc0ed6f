"""What a template keeps of a network's blocks, from their specs; its readers need no family. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from giornata.wire.blocks import BlockSpec
from giornata.wire.values import BlockMode

LEAST_LEVELS: Final = 4
"""Below this many recorded noise levels the picture suffers."""


def each(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """The spec of every block, in order; each counts one."""
    return tuple(spec.model_copy(update={"count": 1}) for spec in specs for _ in range(spec.count))


def grouped(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """Equal blocks as one spec that counts them, in the order in which the first of each comes."""
    found: list[BlockSpec] = []
    for one in specs:
        place = next((index for index, other in enumerate(found) if _alike(other, one)), None)
        if place is None:
            found.append(one)
        else:
            found[place] = one.model_copy(update={"count": found[place].count + one.count})
    return tuple(found)


def _alike(one: BlockSpec, other: BlockSpec) -> bool:
    return one.model_copy(update={"count": other.count}) == other


def together(specs: Iterable[BlockSpec]) -> bool:
    """Whether a step takes all of these blocks from a recording or none: there is nothing to plan or to leave out."""
    return any(spec.together for spec in specs)


def taking_modes(specs: Sequence[BlockSpec]) -> tuple[BlockMode, ...]:
    """The modes in which any of the blocks takes from a recording."""
    return tuple(
        mode for mode in (BlockMode.HIDDEN, BlockMode.KV) if any(spec.channels([mode]) for spec in specs)
    )


def recording_bytes(specs: Sequence[BlockSpec], modes: Collection[BlockMode], cells: int, bits: int) -> int:
    """Bytes that one noise level of a recording for `modes` keeps, ranges and headers not counted.

    `cells` are those of the picture at the finest grain, and values have so many `bits`.
    """
    return sum(spec.count * (cells // spec.grain**2) * spec.cell_bits(modes, bits) // 8 for spec in specs)


@dataclass(frozen=True)
class TemplateRunScope:
    """What a template run keeps."""

    levels: int
    first_block: int
    """Blocks before it keep nothing and are computed in full; it is the number of blocks where none is kept."""


def within(
    budget_bytes: int, *, levels: int, blocks: int, block_bytes: int, least_levels: int = LEAST_LEVELS
) -> TemplateRunScope:
    """The most that fits: first all blocks at fewer levels, then fewer blocks.

    Noise levels cost little to drop, down to a few: the next nearest serves as well. Of the blocks the first ones are
    dropped: a step that computes them in full still has the outside tokens' hidden state, which nothing has to load.
    A block keeps `block_bytes` at one noise level. Fewer than `least_levels` are kept only where fewer are wanted.
    """
    slots = budget_bytes // max(1, block_bytes)
    kept = min(levels, max(slots // blocks, min(levels, least_levels)))
    return TemplateRunScope(kept, blocks - min(blocks, slots // kept))
