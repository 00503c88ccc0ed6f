"""What a network's blocks are, told as data, and what a template keeps of them; its readers need no family. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from giornata.wire.values import Mode

BORDER: Final = "border"
"""The part of a convolution: its input's cells at the borders of tokens, which their neighbours read."""
MOMENTS: Final = "moments"
"""The part of a group norm: mean and sum of squared differences of each token's groups; never quantised."""
PARTS: Final[Mapping[Mode, tuple[str, ...]]] = {
    Mode.FULL: (),
    Mode.HIDDEN: ("hidden",),
    Mode.KV: ("key", "value", BORDER, MOMENTS),
}
"""What a block in each mode takes from a recording, as far as a block of its kind has it."""
EXACT_BITS: Final = 32
"""Of what is never quantised, at the least: it is kept as it was computed."""
LEAST_LEVELS: Final = 4
"""Below this many recorded noise levels the picture suffers."""


@dataclass(frozen=True)
class BlockSpec:
    """A block, or `count` equal neighbours. The multiplications are those of one block and one sequence."""

    grain: int
    """Finest cells a side of one of its cells: 1 for every block of a transformer, whose cells are tokens."""
    heads: int
    """Heads of its attention; 0 for none."""
    parts: Mapping[str, int]
    """Channels a cell of each part that a recording keeps; :data:`PARTS` names them."""
    cell: float
    """Multiplications of a computed cell, its attention's pairs not counted; a text token of a joint block takes as
    many."""
    outside: float
    """Multiplications of a cell whose keys and values are projected, and nothing else."""
    pair: float
    """Multiplications of a pair of query and key."""
    count: int = 1
    together: bool = False
    """Whether all such blocks of a network take from a recording, or none: a UNet's, which know no outside cells."""

    def channels(self, modes: Iterable[Mode]) -> int:
        """Channels a cell of all that a recording for these modes keeps of one block."""
        return sum(self.parts.get(part, 0) for mode in modes for part in PARTS[mode])

    def cell_bits(self, modes: Iterable[Mode], bits: int) -> int:
        """Bits a cell of what :meth:`channels` counts, in so many `bits` a value; :data:`MOMENTS` stay exact."""
        kept = [part for mode in modes for part in PARTS[mode]]
        exact = max(bits, EXACT_BITS)
        return sum(self.parts.get(part, 0) * (exact if part == MOMENTS else bits) for part in kept)


def each(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """The spec of every block, in order; each counts one."""
    return tuple(replace(spec, count=1) for spec in specs for _ in range(spec.count))


def together(specs: Iterable[BlockSpec]) -> bool:
    """Whether a step takes all of these blocks from a recording or none: there is nothing to plan or to leave out."""
    return any(spec.together for spec in specs)


def taking_modes(specs: Sequence[BlockSpec]) -> tuple[Mode, ...]:
    """The modes in which any of the blocks takes from a recording."""
    return tuple(mode for mode in (Mode.HIDDEN, Mode.KV) if any(spec.channels([mode]) for spec in specs))


def recording_bytes(specs: Sequence[BlockSpec], modes: Collection[Mode], cells: int, bits: int) -> int:
    """Bytes that one noise level of a recording for `modes` keeps, ranges and headers not counted.

    `cells` are those of the picture at the finest grain, and values have so many `bits`.
    """
    return sum(spec.count * (cells // spec.grain**2) * spec.cell_bits(modes, bits) // 8 for spec in specs)


def mean_operations(specs: Sequence[BlockSpec]) -> tuple[float, float, float]:
    """Multiplications and additions of the mean block: of a computed cell, a projected one, and a pair."""
    blocks = sum(spec.count for spec in specs)
    cell, outside, pair = (
        2.0 * sum(spec.count * one for spec, one in zip(specs, column, strict=True)) / blocks
        for column in zip(*((spec.cell, spec.outside, spec.pair) for spec in specs), strict=True)
    )
    return cell, outside, pair


@dataclass(frozen=True)
class Keeping:
    """What a template run keeps."""

    levels: int
    first_block: int
    """Blocks before it keep nothing and are computed in full; it is the number of blocks where none is kept."""


def within(
    budget_bytes: int, *, levels: int, blocks: int, block_bytes: int, least_levels: int = LEAST_LEVELS
) -> Keeping:
    """The most that fits: first all blocks at fewer levels, then fewer blocks.

    Noise levels cost little to drop, down to a few: the next nearest serves as well. Of the blocks the first ones are
    dropped: a step that computes them in full still has the outside tokens' hidden state, which nothing has to load.
    A block keeps `block_bytes` at one noise level. Fewer than `least_levels` are kept only where fewer are wanted.
    """
    slots = budget_bytes // max(1, block_bytes)
    kept = min(levels, max(slots // blocks, min(levels, least_levels)))
    return Keeping(kept, blocks - min(blocks, slots // kept))
