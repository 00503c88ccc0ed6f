"""The inputs of the blocks of one forward beside their tokens: what is taken, recorded, added, and changed by LoRAs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from giornata.packed.attention import Apart
from giornata.packed.low_rank import SequenceLoras
from giornata.wire.values import BlockMode

T = TypeVar("T")


class KeysValues(Protocol):
    """A source of keys and values for tokens that a sequence does not compute."""

    def keys_values(self, block: int) -> Apart:
        """Keys, after norm and rotary embedding, and values, with room for the sequence's own or none."""


class KVSource(KeysValues, Protocol):
    """A source of a template run's keys and values for the tokens outside a sequence's compute set."""

    @property
    def keeps(self) -> bool:
        """Return whether it has what it answers as blocks read it: then it answers the same in every step."""

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim): input of `block`, as its image stream."""

    def part(self, block: int, part: str) -> Tensor:
        """(outside, channels): another part of `block` that :class:`giornata.planning.operations.BlockSpec` names."""


class KeysValuesRecorder(Protocol):
    """Keeps keys and values of some tokens. It copies what it is given, which later blocks overwrite."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each; keys after norm and rotary embedding."""


class ActivationRecorder(KeysValuesRecorder, Protocol):
    """Keeps what later edits may need. It copies what it is given, which later blocks overwrite.

    `tokens` are the tokens of the picture that the block computes: all of them, or the region's where the block takes
    the others from a template.
    """

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the image stream that enters `block`."""

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels): another part of `block`, see :meth:`KVSource.part`."""


class Residuals(Protocol):
    """The residuals of a sequence's ControlNets behind its blocks, in one step: scaled, and summed over all of them."""

    @property
    def whole(self) -> bool:
        """Return whether samples are of all tokens of the picture; else they are of its region's, in that order."""

    def sample(self, block: int) -> Tensor | None:
        """(tokens, channels): what is added behind `block`, and may be waited for here; None for nothing.

        Of a UNet, `block` counts its skip connections, and the middle's output behind them; a token is a tile.
        """


@dataclass(frozen=True, eq=False)
class CachedTokens:
    """The tokens that a sequence takes from a template: its region is computed, all others are taken."""

    modes: tuple[BlockMode, ...]
    """The mode of every block."""
    source: KVSource


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """All that one sequence uses beside its tokens, one field for each kind; any of them may come together."""

    taken: CachedTokens | None = None
    """None computes all tokens."""
    recorder: ActivationRecorder | None = None
    padding: KeysValues | None = None
    """Where its prompt's padding is found in every block, whatever the block's mode; None computes it."""
    padding_recorder: KeysValuesRecorder | None = None
    """Is shown its prompt's padding, where that is computed."""
    low_rank: SequenceLoras | None = None
    """Its LoRAs, which change what the layers make of its tokens; None for none."""
    residuals: Residuals | None = None
    """None where no ControlNet acts on it."""


def by_sequence(of_rows: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return what sequences have, in the order of a batch: the positive ones of all rows, then the negative ones."""
    return (*[own[0] for own in of_rows], *[own[1] for own in of_rows if len(own) > 1])
