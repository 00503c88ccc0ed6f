"""The blocks of a network as data: what they compute, counted by kind of operation, and what a template keeps of them.

Telemetry carries them, so that planner, store, router and simulator need no code for a family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pydantic import Field

from giornata.wire.values import BlockMode, WireModel

BORDER: Final = "border"
"""The part of a convolution: its input's cells at the borders of tokens, which their neighbours read."""
MOMENTS: Final = "moments"
"""The part of a group norm: mean and sum of squared differences of each token's groups; never quantised."""
PARTS: Final[Mapping[BlockMode, tuple[str, ...]]] = {
    BlockMode.FULL: (),
    BlockMode.HIDDEN: ("hidden",),
    BlockMode.KV: ("key", "value", BORDER, MOMENTS),
}
"""What a block in each mode takes from a recording, as far as a block of its kind has it."""
EXACT_BITS: Final = 32
"""Least bits of a value that is never quantised: it is kept as it was computed."""


class BlockSpec(WireModel):
    """A block, or `count` equal ones. What it counts is of one block and one sequence.

    Operations are multiplications; every one of them is followed by an addition.
    """

    grain: int = 1
    """Finest cells a side of one of its cells: 1 for every block of a transformer, whose cells are tokens."""
    heads: int = 0
    """Heads of its attention; 0 for none."""
    parts: dict[str, int] = Field(default_factory=dict)
    """Channels a cell of each part that a recording keeps; :data:`PARTS` names them."""
    linear: float = 0.0
    """In linear layers, for a computed cell."""
    text: float = 0.0
    """In linear layers, for a computed text token beside the picture's; 0 where text passes no such layer."""
    outside: float = 0.0
    """In linear layers, for a cell whose keys and values are projected, and nothing else."""
    pair: float = 0.0
    """In attention, for a query and a key of the picture."""
    text_pair: float = 0.0
    """In attention, for a query and a key one of which, or both, is a text token beside the picture's."""
    across: float = 0.0
    """In attention, for a computed cell over a text that passes no block: cross-attention."""
    convolution: float = 0.0
    """In convolutions, for a computed cell."""
    gathered: float = 0.0
    """Values, no operations, that a computed cell gathers from itself and its neighbours where it takes from a
    recording: the windows of convolutions over tiles."""
    count: int = 1
    together: bool = False
    """Whether all such blocks of a network take from a recording, or none: a UNet's, which know no outside cells."""

    def channels(self, modes: Iterable[BlockMode]) -> int:
        """Channels a cell of all that a recording for these modes keeps of one block."""
        return sum(self.parts.get(part, 0) for mode in modes for part in PARTS[mode])

    def cell_bits(self, modes: Iterable[BlockMode], bits: int) -> int:
        """Bits a cell of what :meth:`channels` counts, in so many `bits` a value; :data:`MOMENTS` stay exact."""
        kept = [part for mode in modes for part in PARTS[mode]]
        exact = max(bits, EXACT_BITS)
        return sum(self.parts.get(part, 0) * (exact if part == MOMENTS else bits) for part in kept)
