"""Batches at one step, in full or masked; what their values are does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch

from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.planning.operations import step_work
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs, with_low_ranks
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.slabs import Slabs
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, Entry, StoredTensor
from giornata_lab.bench.compute.engines import DEVICE_BYTES
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit, multiplications

MASK: Final = 0.11
"""The production trace's mean ratio."""
STEPS: Final = 4


class Batches:
    """Makes steps of masked rows of one picture, each with a mask of the ratio `mask` at its own place."""

    def __init__(self, rows: Rows, mask: float = MASK) -> None:
        self._rows, self._family, self._mask = rows, rows.family, mask
        self._entry = self._made_entry()

    def prepared(
        self, count: int, *, masked: bool, low_ranks: Sequence[SequenceLoras | None] = ()
    ) -> Callable[[], object]:
        """A step of `count` rows, under LoRAs or none; what it takes is on the device from its first call on."""
        family = self._family
        rows = [self._row(index, count) for index in range(count)]
        with torch.inference_mode():
            sets = low_ranks or [None] * count
            placed = [place_inputs(row, family, each) for row, each in zip(rows, sets, strict=True)]
            assembly = assemble(family, rows, placed)
        uses: Sequence[BlockInputs] = ()
        if masked:
            uses = [BlockInputs(CachedTokens(self._entry.modes, self._slabs(row))) for row in rows]
        if low_ranks:
            uses = with_low_ranks(uses or (BlockInputs(),) * count, rows, low_ranks)

        def step() -> object:
            with torch.inference_mode():
                return denoise_step(family, assembly, rows, uses)

        return step

    def kept_bytes(self, count: int) -> int:
        """Bytes of the slabs of `count` masked rows, which stay from step to step."""
        made = [self._slabs(self._row(index, count)) for index in range(count)]
        modes = [(block, mode) for block, mode in enumerate(self._entry.modes) if mode is not BlockMode.FULL]
        return int(sum(slabs.sizes(mode)[block] for slabs in made for block, mode in modes))

    def tera_operations(self, count: int, *, masked: bool) -> float:
        """See :func:`tera_operations`; of a step in full, or of one that takes keys and values."""
        rows = [self._row(index, count) for index in range(count)]
        return tera_operations(self._family, rows, BlockMode.KV if masked else BlockMode.FULL)

    def _slabs(self, row: Row) -> Slabs:
        if row.region is None:
            raise ValueError("the mask leaves nothing to be reused; ask for a larger picture")
        device = device_for(self._family.device, DEVICE_BYTES)
        return Slabs(self._entry, row.region, row.own_tokens[0], self._family, device=device)

    def _row(self, index: int, count: int) -> Row:
        where = (index + 0.5) / count
        row = self._rows.masked(WorkloadEdit(index, 0, self._mask, where, 1 - where, STEPS))
        return replace(row, latent=row.latent.to(self._family.device))

    def _made_entry(self) -> Entry:
        """All blocks keep keys and values; each has tensors of its own name over one memory on the host."""
        bits, width = self._rows.setting.bits, self._family.specs[0].parts["key"]
        where = self._row(0, 1).region
        if where is None:
            raise ValueError("the mask leaves nothing to be reused; ask for a larger picture")
        tokens = len(where.computed) + len(where.outside)  # those beside the picture's too
        kept = _quantised(tokens, width, bits, self._family)
        blocks = tuple(CachedBlock(replace(kept), replace(kept)) for _ in range(self._family.depth))
        return Entry(0.5, blocks)


def tera_operations(family: ModelFamily, rows: Sequence[Row], mode: BlockMode) -> float:
    """Floating-point operations of a step of `rows`, in 10^12, whose blocks all have this `mode`; padding is kept where
    a step is masked."""
    shapes = [shape for row in rows for shape in row.shaped(padding_kept=mode is not BlockMode.FULL)]
    modes = [(mode,) * family.operations.blocks] * len(shapes)
    return 2 * multiplications(step_work(family.operations, shapes, modes)) / 1e12


def _quantised(tokens: int, channels: int, bits: int, family: ModelFamily) -> StoredTensor:
    """Zeros as :func:`giornata_denoiser.rows.template.store` keeps them: on the host, but on `meta` for `meta`."""
    where = family.device if family.device.type == "meta" else "cpu"
    if bits == 0:
        made = StoredTensor(torch.zeros(tokens, channels, dtype=family.dtype, device=where))
    else:
        data = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8, device=where)
        made = StoredTensor(data, *torch.zeros(2, channels, device=where).unbind())
    return made.pinned() if family.device.type == "cuda" else made
