"""Recording a template run: every step leaves an entry."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from giornata_denoiser.rows.stored import Stored, store
from giornata_denoiser.rows.template import Entry, Form, Kept


class EntryRecorder:
    """Keeps what one forward shows of one sequence; satisfies :class:`giornata.packed.uses.Recorder`.

    Args:
        sigma: noise level of the forward.
        blocks: how many the transformer has.
        forms: what each block keeps.
        bits: of what is kept; see :mod:`giornata_denoiser.rows.stored`.
        first_block: that keeps anything.
    """

    def __init__(
        self, sigma: float, blocks: int, forms: Collection[Form], bits: int, first_block: int = 0
    ) -> None:
        self._sigma, self._blocks, self._forms, self._bits = sigma, blocks, frozenset(forms), bits
        self._first_block = first_block
        self._hidden: dict[int, Stored] = {}
        self._heads: dict[int, tuple[Stored, Stored]] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        if Form.HIDDEN in self._forms and block >= self._first_block:
            self._hidden[block] = store(hidden, self._bits)

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        if Form.KV in self._forms and block >= self._first_block:
            self._heads[block] = store(key.flatten(1), self._bits), store(value.flatten(1), self._bits)

    def entry(self) -> Entry:
        """What was kept, once the forward is over; in host memory."""
        return Entry(self._sigma, tuple(self._kept(block) for block in range(self._blocks)))

    def _kept(self, block: int) -> Kept:
        key, value = self._heads.get(block, (None, None))
        return Kept(_on_host(key), _on_host(value), _on_host(self._hidden.get(block)))


def _on_host(stored: Stored | None) -> Stored | None:
    return stored.pinned() if stored is not None and stored.data.is_cuda else stored
