"""What an edit's outside tokens differ in from its template's: learned in one step, added in later ones. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import Tensor

from giornata_denoiser.rows.stored import StoredTensor

LEAST: Final = 0.25
"""The noise level below which differences shrink no more."""


def shrinkage(level: float) -> float:
    """How large differences are at a noise level, of what they are at 1; decision record 0009 says why."""
    return math.sqrt(max(level, LEAST))


@dataclass(frozen=True, eq=False)
class Correction:
    """The differences of one sequence.

    The keys and values of outside tokens depend on the edit too: they attend to its prompt and to what is being
    painted. By how much they differ from the template's at one noise level is added to every entry that serves a row.
    FlashPS has no such thing. It belongs to the template and the mask, hardly to prompt or seed, so that later edits
    take the one that an earlier edit learned; decision record 0009 has the measurements.
    """

    deltas: Mapping[tuple[int, str], StoredTensor]
    """(outside, channels) each: what is added to a part of a block at the highest noise level."""
    group: str = ""
    """The processes of which this one has learned a part of it, and none the rest; empty where it is whole."""

    def of(self, block: int, part: str) -> StoredTensor | None:
        """What is added to this part of a block; None where it kept no such part."""
        return self.deltas.get((block, part))

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of all differences."""
        return sum(delta.size_bytes for delta in self.deltas.values())

    def narrowed(self, index: Tensor) -> Correction:
        """That of the outside tokens `index` (n,), int64, alone."""
        return replace(self, deltas={place: delta.rows(index) for place, delta in self.deltas.items()})

    def pinned(self) -> Correction:
        """The same in pinned host memory."""
        return replace(self, deltas={place: delta.pinned() for place, delta in self.deltas.items()})
