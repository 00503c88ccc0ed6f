"""Recorders: what the steps of a row leave for later ones, for templates, and as corrections."""

from __future__ import annotations

import torch
from torch import Tensor

from giornata.packed.attention import CachedKV, KVPages
from giornata.packed.packing import ActivationRecorder
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import CachedBlock, Correction, Entry, StoredTensor, bits_of, store


class OwnKeysValues(CachedKV):
    """A cache of one sequence's own keys and values, in `bits` if any: see :mod:`giornata_denoiser.rows.template`.

    What is kept in bits lies by itself, without room for the sequence's own.
    """

    def __init__(self, index: Tensor | None, own: int, bits: int | None = None) -> None:
        super().__init__(index, own)
        self._bits = bits
        self._places: Tensor | None = None
        """(kept,) int64: all of what is kept in bits."""
        self._parts: dict[tuple[int, str], tuple[StoredTensor, torch.dtype]] = {}

    @property
    def keeps(self) -> bool:
        """What is kept in bits is unpacked where it is read."""
        return self._bits is None

    def part(self, block: int, part: str) -> Tensor:
        """(outside, channels); LookupError as :meth:`keys_values`."""
        kept, dtype = self._parts[block, part]
        return kept.data if kept.scale is None else kept.levels.rows().to(dtype)

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of which it keeps its own."""
        if self._bits is None:
            super().keep(block, key, value)
            return
        key, value = self._of(key), self._of(value)
        if self._places is None:
            self._places = torch.arange(len(key), device=key.device)
        stored = (store(part.flatten(1), self._bits).levels for part in (key, value))
        self._kept[block] = KVPages(self._places, *stored)

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels), of which it keeps its own."""
        own = self._of(kept)
        bits = bits_of(part, self._bits or EXACT)
        self._parts[block, part] = (StoredTensor(own) if bits == EXACT else store(own, bits)), kept.dtype


class EntryRecorder:
    """Keeps what one forward at a noise level shows of one sequence in so many `blocks`, and the latent's `picture`.

    Satisfies :class:`giornata.packed.packing.ActivationRecorder`.
    """

    def __init__(self, level: float, blocks: int, spec: RecordingSpec, picture: Tensor | None = None) -> None:
        self._level, self._blocks, self._spec = level, blocks, spec
        self._parts: dict[int, dict[str, StoredTensor]] = {}
        if picture is not None:
            self._parts[0] = {"picture": StoredTensor(picture)}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        if CacheForm.HIDDEN in self._spec.forms and block >= self._spec.first_block:
            self._keep(block, hidden=hidden)

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        if CacheForm.KV in self._spec.forms and block >= self._spec.first_block:
            self._keep(block, key=key.flatten(1), value=value.flatten(1))

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        if CacheForm.KV in self._spec.forms and block >= self._spec.first_block:
            self._keep(block, **{part: kept})

    def kept(self) -> Entry:
        """Return what was kept, where it was computed, once the forward is over."""
        return Entry(
            self._level, tuple(CachedBlock(**self._parts.get(block, {})) for block in range(self._blocks))
        )

    def entry(self) -> Entry:
        """The same in host memory; waits for the device."""
        kept = self.kept()
        on_device = any(part.data.is_cuda for block in kept.blocks for part in block.parts)
        return kept.pinned() if on_device else kept

    def _keep(self, block: int, **parts: Tensor) -> None:
        """Each (tokens, channels)."""
        kept = {name: store(part, bits_of(name, self._spec.bits)) for name, part in parts.items()}
        self._parts.setdefault(block, {}).update(kept)


class Recorders:
    """Several recorders of one sequence, which are shown the same; an :class:`ActivationRecorder` itself."""

    def __init__(self, *recorders: ActivationRecorder) -> None:
        self._recorders = recorders

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        for recorder in self._recorders:
            recorder.hidden(block, hidden)

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        for recorder in self._recorders:
            recorder.keys_values(block, key, value)

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        for recorder in self._recorders:
            recorder.part(block, part, kept)


class CorrectionRecorder:
    """Learns a sequence's correction in a step that is computed in full; an :class:`ActivationRecorder` of that step.

    `slabs` are the sequence's, of the entry that serves that step; they hold its own values afterwards. The differences
    are kept in `bits`; see :mod:`giornata_denoiser.rows.template`.
    """

    def __init__(self, slabs: Slabs, bits: int) -> None:
        self._slabs, self._bits = slabs, bits
        self._deltas: dict[tuple[int, str], StoredTensor] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the input of `block`."""
        if self._slabs.entry.blocks[block].hidden is not None:
            self._take(block, "hidden", hidden, self._slabs.hidden(block))

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        if self._slabs.entry.blocks[block].key is not None:
            slab = self._slabs.gathered(block)
            self._take(block, "key", key.flatten(1), slab.key[slab.room :].flatten(1))
            self._take(block, "value", value.flatten(1), slab.value[slab.room :].flatten(1))

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        if self._slabs.entry.blocks[block].part(part) is not None:
            self._take(block, part, kept, self._slabs.part(block, part))

    def correction(self) -> Correction:
        """Return what was learned, once the forward is over."""
        return Correction(self._deltas, self._slabs.group)

    def _take(self, block: int, part: str, own: Tensor, template: Tensor) -> None:
        """Keep own - template as at the highest noise level; `template` (outside, channels) becomes the own one."""
        region = self._slabs.shown if part == "hidden" else self._slabs.region
        own = own.index_select(0, region.outside)
        self._deltas[block, part] = store((own - template) / self._slabs.shrinkage, bits_of(part, self._bits))
        template.copy_(own)
