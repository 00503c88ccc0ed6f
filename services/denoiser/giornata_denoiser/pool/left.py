"""What a step leaves beside the rows' states, in a file of shared memory: entries, corrections, previews."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giornata import unnamed
from giornata_denoiser.pool.memory import ALIGNMENT, Place, copied, dtype_name, mapped_tensor, viewed
from giornata_denoiser.pool.messages import DeltaLeft, EntryLeft, PreviewLeft, StoredAt, TensorAt
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.stored import Stored
from giornata_denoiser.rows.template import Entry, Kept


class Leaving:
    """Describes what is to be left, then writes it."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int]] = []
        self.size_bytes = 0
        """Bytes of all that is left."""

    def entry(self, entry: Entry) -> EntryLeft:
        """What a step recorded."""
        return EntryLeft(level=entry.level, blocks=tuple(self._kept(kept) for kept in entry.blocks))

    def correction(self, correction: Correction) -> tuple[DeltaLeft, ...]:
        """What a step taught a sequence."""
        return tuple(
            DeltaLeft(block=block, part=part, delta=self._stored(delta))
            for (block, part), delta in correction.deltas.items()
        )

    def preview(self, index: int, pixels: npt.NDArray[np.uint8]) -> PreviewLeft:
        """What a row looks like."""
        return PreviewLeft(index=index, pixels=self._at(torch.from_numpy(pixels)))

    def written(self) -> int | None:
        """A descriptor of the file, the caller's to close; None where nothing is left. OSError without memory."""
        if not self._tensors:
            return None
        descriptor = unnamed.allocated("giornata-left", self.size_bytes)
        try:
            memory = mapped_tensor(descriptor, self.size_bytes)
            for tensor, offset in self._tensors:
                copied(tensor, memory, offset)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _kept(self, kept: Kept) -> dict[str, StoredAt]:
        return {name: self._stored(part) for name, part in vars(kept).items() if part is not None}

    def _stored(self, stored: Stored) -> StoredAt:
        scale, low = (None if part is None else self._at(part) for part in (stored.scale, stored.low))
        return StoredAt(data=self._at(stored.data), scale=scale, low=low)

    def _at(self, tensor: Tensor) -> TensorAt:
        offset = self.size_bytes
        self._tensors.append((tensor, offset))
        self.size_bytes += -(-max(tensor.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return TensorAt(offset=offset, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


class Found:
    """Reads what a rank has left; `memory` are the bytes of its file."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def entry(self, left: EntryLeft) -> Entry:
        """As :meth:`Leaving.entry` was told."""
        blocks = (Kept(**{name: self._stored(part) for name, part in block.items()}) for block in left.blocks)
        return Entry(left.level, tuple(blocks))

    def corrections(self, left: Sequence[Sequence[DeltaLeft]]) -> tuple[Correction, ...]:
        """One of each sequence, as :meth:`Leaving.correction` was told."""
        return tuple(
            Correction({(each.block, each.part): self._stored(each.delta) for each in deltas})
            for deltas in left
        )

    def pixels(self, left: PreviewLeft) -> npt.NDArray[np.uint8]:
        """(height, width, 3), as :meth:`Leaving.preview` was told."""
        found: npt.NDArray[np.uint8] = self._tensor(left.pixels).numpy()
        return found

    def _stored(self, at: StoredAt) -> Stored:
        scale, low = (None if part is None else self._tensor(part) for part in (at.scale, at.low))
        return Stored(self._tensor(at.data), scale, low)

    def _tensor(self, at: TensorAt) -> Tensor:
        return viewed(self._memory, Place(0, at.offset, at.shape, at.dtype))
