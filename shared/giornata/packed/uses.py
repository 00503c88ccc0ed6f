"""What a sequence does with a template in one forward: takes from it, or records it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from giornata.packed.attention import Outside
from giornata.wire.values import Mode


class Source(Protocol):
    """Where a sequence finds what a template run kept, of the tokens outside its compute set."""

    def keys_values(self, block: int) -> Outside:
        """Keys, after norm and rotary embedding, and values, with room for the sequence's own or none."""

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim): input of `block`, as its image stream."""


class Recorder(Protocol):
    """Takes in what later edits may need. What it is given is overwritten later: it keeps copies."""

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the image stream that enters `block`, all tokens of the picture."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each: of the picture's tokens, keys after norm and rotary embedding."""


@dataclass(frozen=True, eq=False)
class Reuse:
    """A sequence that computes its region and takes the rest from a template."""

    modes: tuple[Mode, ...]
    """Of every block."""
    source: Source


Use = Reuse | Recorder | None
"""None computes all tokens and keeps nothing."""


def by_sequence(of_rows: Sequence[Sequence[Use]]) -> tuple[Use, ...]:
    """In the order of a batch's sequences: the positive ones of all rows, then the negative ones."""
    return (*(uses[0] for uses in of_rows), *(uses[1] for uses in of_rows if len(uses) > 1))
