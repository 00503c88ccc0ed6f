"""A sequence's own keys and values of tokens that not every step computes: kept from one step, taken by later ones."""

from __future__ import annotations

from torch import Tensor

from giornata.packed.attention import Apart, DenseKV


class CachedKV:
    """What one sequence keeps; satisfies :class:`giornata.packed.uses.KVSource`.

    `index`, (kept,) int64 on the device, are the tokens that are kept of those that a recorder shows; None keeps all.
    There is room for the keys and values of `own` tokens in front of those that are kept.
    """

    def __init__(self, index: Tensor | None, own: int) -> None:
        self._index, self._own = index, own
        self._kept: dict[int, Apart] = {}

    def keys_values(self, block: int) -> Apart:
        """(own + kept, heads, head_dim) each, the first `own` rows free.

        Raises:
            LookupError: no step that keeps has passed the block.
        """
        return self._kept[block]

    def hidden(self, block: int) -> Tensor:
        """Nothing is kept of a block's input.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the input of block {block} is not kept")

    def part(self, block: int, part: str) -> Tensor:
        """Nothing is kept of other parts.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"{part} of block {block} is not kept")

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of which it keeps its own."""
        key, value = self._of(key), self._of(value)
        kept = self._kept.get(block)
        if not isinstance(kept, DenseKV):
            shape = self._own + len(key), *key.shape[1:]
            kept = self._kept[block] = DenseKV(key.new_empty(shape), value.new_empty(shape), self._own)
        kept.key[self._own :] = key
        kept.value[self._own :] = value

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels) of another part: nothing is kept."""

    def _of(self, shown: Tensor) -> Tensor:
        """The tokens that are kept of those that are shown."""
        return shown if self._index is None else shown.index_select(0, self._index)


class CachedKVRecorder:
    """Fills what a sequence keeps in a step, whose :class:`giornata.packed.uses.ActivationRecorder` it is."""

    def __init__(self, kept: CachedKV) -> None:
        self._kept = kept

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nothing is kept of a block's input."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        self._kept.keep(block, key, value)

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        self._kept.keep_part(block, part, kept)
