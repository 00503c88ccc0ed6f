"""Recording a template run: every step leaves an entry."""

from __future__ import annotations

from torch import Tensor

from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.stored import Stored, store
from giornata_denoiser.rows.template import Entry, Form, Kept


class EntryRecorder:
    """Keeps what one forward at a noise level shows of one sequence in so many `blocks`.

    Satisfies :class:`giornata.packed.uses.ActivationRecorder`.
    """

    def __init__(self, level: float, blocks: int, spec: RecordingSpec) -> None:
        self._level, self._blocks, self._spec = level, blocks, spec
        self._hidden: dict[int, Stored] = {}
        self._heads: dict[int, tuple[Stored, Stored]] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        if Form.HIDDEN in self._spec.forms and block >= self._spec.first_block:
            self._hidden[block] = store(hidden, self._spec.bits)

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        if Form.KV in self._spec.forms and block >= self._spec.first_block:
            bits = self._spec.bits
            self._heads[block] = store(key.flatten(1), bits), store(value.flatten(1), bits)

    def entry(self) -> Entry:
        """What was kept, once the forward is over; in host memory."""
        return Entry(self._level, tuple(self._kept(block) for block in range(self._blocks)))

    def _kept(self, block: int) -> Kept:
        parts = (*self._heads.get(block, (None, None)), self._hidden.get(block))
        return Kept(*(part.pinned() if part is not None and part.data.is_cuda else part for part in parts))
