"""The results of a step beside the rows' states, in a file of shared memory: entries, corrections, previews."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from giornata import anonymous_memory
from giornata_denoiser.pool.messages import (
    CorrectionDeltaLayout,
    EntryLayout,
    PreviewLayout,
    StoredTensorLayout,
    TensorLayout,
)
from giornata_denoiser.pool.shared_memory import (
    ALIGNMENT,
    TensorLocation,
    copied,
    dtype_name,
    mapped_tensor,
    viewed,
)
from giornata_denoiser.rows.template import CachedBlock, Correction, Entry, StoredTensor


class StepResultWriter:
    """Describes what is to be left, then writes it."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, int]] = []
        self.size_bytes = 0
        """Bytes of all that is left."""

    def entry(self, entry: Entry) -> EntryLayout:
        """Return what a step recorded."""
        return EntryLayout(level=entry.level, blocks=tuple(self._kept(kept) for kept in entry.blocks))

    def correction(self, correction: Correction) -> tuple[CorrectionDeltaLayout, ...]:
        """Return what a step taught a sequence."""
        return tuple(
            CorrectionDeltaLayout(block=block, part=part, delta=self._stored(delta))
            for (block, part), delta in correction.deltas.items()
        )

    def preview(self, index: int, pixels: npt.NDArray[np.uint8]) -> PreviewLayout:
        """Return what a row looks like."""
        return PreviewLayout(index=index, pixels=self._at(torch.from_numpy(pixels)))

    def written(self) -> int | None:
        """A descriptor of the file, the caller's to close; None where nothing is left. OSError without memory."""
        if not self._tensors:
            return None
        descriptor = anonymous_memory.allocated("giornata-left", self.size_bytes)
        try:
            memory = mapped_tensor(descriptor, self.size_bytes)
            for tensor, offset in self._tensors:
                copied(tensor, memory, offset)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _kept(self, kept: CachedBlock) -> dict[str, StoredTensorLayout]:
        return {name: self._stored(part) for name, part in vars(kept).items() if part is not None}

    def _stored(self, stored: StoredTensor) -> StoredTensorLayout:
        scale, low = (None if part is None else self._at(part) for part in (stored.scale, stored.low))
        return StoredTensorLayout(data=self._at(stored.data), scale=scale, low=low)

    def _at(self, tensor: Tensor) -> TensorLayout:
        offset = self.size_bytes
        self._tensors.append((tensor, offset))
        self.size_bytes += -(-max(tensor.nbytes, 1) // ALIGNMENT) * ALIGNMENT
        return TensorLayout(offset=offset, shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))


class StepResultReader:
    """Reads what a rank has left; `memory` are the bytes of its file."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def entry(self, left: EntryLayout) -> Entry:
        """As :meth:`StepResultWriter.entry` was told."""
        blocks = (
            CachedBlock(**{name: self._stored(part) for name, part in block.items()}) for block in left.blocks
        )
        return Entry(left.level, tuple(blocks))

    def corrections(self, left: Sequence[Sequence[CorrectionDeltaLayout]]) -> tuple[Correction, ...]:
        """One of each sequence, as :meth:`StepResultWriter.correction` was told."""
        return tuple(
            Correction({(each.block, each.part): self._stored(each.delta) for each in deltas})
            for deltas in left
        )

    def pixels(self, left: PreviewLayout) -> npt.NDArray[np.uint8]:
        """(height, width, 3), as :meth:`StepResultWriter.preview` was told."""
        found: npt.NDArray[np.uint8] = self._tensor(left.pixels).numpy()
        return found

    def _stored(self, at: StoredTensorLayout) -> StoredTensor:
        scale, low = (None if part is None else self._tensor(part) for part in (at.scale, at.low))
        return StoredTensor(self._tensor(at.data), scale, low)

    def _tensor(self, at: TensorLayout) -> Tensor:
        return viewed(self._memory, TensorLocation(0, at.offset, at.shape, at.dtype))
