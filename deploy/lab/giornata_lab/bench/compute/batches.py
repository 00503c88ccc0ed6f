"""Batches at one step, in every state that a step may be in; what their values are does not matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, Final

import torch

from giornata.packed.attention import varlen
from giornata.packed.compute_set import BlockInputs, CachedTokens
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer
from giornata.planning.operations import step_work
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs, with_low_ranks
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.loading import device_for
from giornata_denoiser.engine.recorders import CorrectionRecorder
from giornata_denoiser.engine.slabs import Device, Slabs
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, Correction, Entry, StoredTensor
from giornata_lab.bench.compute.engines import DEVICE_BYTES
from giornata_lab.bench.compute.rows import Rows
from giornata_lab.bench.compute.workload import WorkloadEdit

MASK: Final = 0.11
"""The production trace's mean ratio."""
STEPS: Final = 4


Step = Callable[[LaneTracer], object]


class StepKind(StrEnum):
    """What a step has to do."""

    FULL = "full"
    FIRST = "full, learns corrections"
    """The first step of rows that take from a template and bring no corrections; their slabs are loaded in it."""
    MASKED = "masked"
    """What it takes is on the device."""
    LOADS = "masked, loads"
    """The first step that an entry serves; loads are part of it."""
    CORRECTED = "masked, loads corrected"
    """Likewise, with corrections that are on the device."""


LOADING: Final = frozenset({StepKind.FIRST, StepKind.LOADS, StepKind.CORRECTED})


class MetaDevice(Device):
    """Loads go from the host to `meta` as they go to a GPU: whole tensors, once for all rows of an entry."""

    shares = True

    def __init__(self) -> None:
        self._here: dict[int, StoredTensor] = {}

    def bring(self, stored: StoredTensor) -> StoredTensor:
        """A copy, unless it is there."""
        if stored.data.is_meta:
            return stored
        if id(stored) not in self._here:
            self._here[id(stored)] = stored.to(torch.device("meta"))
        return self._here[id(stored)]


class Batches:
    """Makes steps of masked rows of one picture, each with a mask of the ratio `mask` at its own place.

    Args:
        rows: whose family, sizes and setting they have. On `meta`, the family attends as on a GPU from now on.
    """

    def __init__(self, rows: Rows, mask: float = MASK) -> None:
        self._rows, self._family, self._mask = rows, rows.family, mask
        if self._on_meta:
            from giornata.packed.kernels import TRITON  # noqa: PLC0415 - needs Triton, as nothing else here

            network: Any = self._family.network
            # What their `choose` picks in half precision on a GPU.
            if isinstance(network, DrivenNetwork):
                network.attend = partial(varlen, gather=TRITON.gather)
            else:
                network._parts = network._parts._replace(attend=varlen, elementwise=TRITON)
        self._entry = self._made_entry()

    def prepared(self, kind: StepKind, count: int, low_ranks: Sequence[SequenceLoras | None] = ()) -> Step:
        """A step of `count` rows, under LoRAs or none; called again, it is the same step again."""
        family = self._family
        rows = [self._row(index, count) for index in range(count)]
        with torch.inference_mode():
            sets = low_ranks or [None] * count
            placed = [place_inputs(row, family, each) for row, each in zip(rows, sets, strict=True)]
            assembly = assemble(family, rows, placed)
            corrections = [self._correction(row) if kind is StepKind.CORRECTED else None for row in rows]
        made = partial(self._uses, kind, rows, corrections)
        kept = None if kind in LOADING else made(self._device(), UNTRACED)

        def step(trace: LaneTracer) -> object:
            with torch.inference_mode():
                uses = made(self._device(), trace) if kept is None else kept
                if low_ranks:
                    uses = with_low_ranks(uses or (BlockInputs(),) * count, rows, low_ranks)
                return denoise_step(family, assembly, rows, uses, trace)

        return step

    def kept_bytes(self, count: int) -> int:
        """Bytes of the slabs of `count` masked rows, which stay from step to step."""
        rows = [self._row(index, count) for index in range(count)]
        made = [self._slabs(row, self._device(), UNTRACED, None) for row in rows]
        return int(
            sum(
                slabs.sizes(mode)[block]
                for slabs in made
                for block, mode in enumerate(self._entry.modes)
                if mode is not BlockMode.FULL
            )
        )

    def tera_operations(self, kind: StepKind, count: int) -> float:
        """See :func:`tera_operations`; of a step in full, or of one that takes keys and values."""
        rows = [self._row(index, count) for index in range(count)]
        return tera_operations(self._family, rows, BlockMode.FULL if kind is StepKind.FULL else BlockMode.KV)

    def _uses(
        self,
        kind: StepKind,
        rows: Sequence[Row],
        corrections: Sequence[Correction | None],
        device: Device,
        trace: LaneTracer,
    ) -> tuple[BlockInputs, ...]:
        if kind is StepKind.FULL:
            return ()
        bits = self._rows.setting.correction_bits
        uses = []
        for row, correction in zip(rows, corrections, strict=True):
            slabs = self._slabs(row, device, trace, correction)
            if kind is StepKind.FIRST and row.region is not None and bits is not None:
                uses.append(BlockInputs(recorder=CorrectionRecorder(slabs, bits)))
            else:
                uses.append(BlockInputs(CachedTokens(self._entry.modes, slabs)))
        return tuple(uses)

    def _slabs(self, row: Row, device: Device, trace: LaneTracer, correction: Correction | None) -> Slabs:
        if row.region is None:
            raise ValueError("the mask leaves nothing to be reused; ask for a larger picture")
        own = row.own_tokens[0]
        return Slabs(
            self._entry, row.region, own, self._family, device=device, trace=trace, correction=correction
        )

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

    def _correction(self, row: Row) -> Correction:
        """In the setting's bits, on the device, where a first step leaves it."""
        bits, width = self._rows.setting.bits, self._family.specs[0].parts["key"]
        outside = 0 if row.region is None else len(row.region.outside)
        delta = _quantised(outside, width, bits, self._family).to(self._family.device)
        blocks = range(self._family.depth)
        return Correction({(block, part): replace(delta) for block in blocks for part in ("key", "value")})

    def _device(self) -> Device:
        return MetaDevice() if self._on_meta else device_for(self._family.device, DEVICE_BYTES)

    @property
    def _on_meta(self) -> bool:
        return self._family.device.type == "meta"


def tera_operations(family: ModelFamily, rows: Sequence[Row], mode: BlockMode) -> float:
    """Floating-point operations of a step of `rows`, in 10^12, whose blocks all have this `mode`; padding is kept where
    a step is masked."""
    shapes = [shape for row in rows for shape in row.shaped(padding_kept=mode is not BlockMode.FULL)]
    modes = [(mode,) * family.operations.blocks] * len(shapes)
    return 2 * step_work(family.operations, shapes, modes).multiplications / 1e12


def _quantised(tokens: int, channels: int, bits: int, family: ModelFamily) -> StoredTensor:
    """Zeros as :func:`giornata_denoiser.rows.template.store` keeps them, on the host; pinned for a CUDA device."""
    if bits == 0:
        made = StoredTensor(torch.zeros(tokens, channels, dtype=family.dtype))
    else:
        data = torch.zeros(tokens, channels * bits // 8, dtype=torch.uint8)
        made = StoredTensor(data, torch.zeros(channels), torch.zeros(channels))
    return made.pinned() if family.device.type == "cuda" else made
