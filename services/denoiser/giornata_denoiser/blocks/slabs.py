"""Slabs: what sequences take from one entry, which of it is here, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.packed.pages import KVPages
from giornata.packed.region import Region
from giornata.packed.tracing import UNTRACED, LaneTracer, TraceLane
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.device import Device, TransferHandle
from giornata_denoiser.blocks.gathering import Slab, SlabBuilder, tensors
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.template import Entry

Place = tuple[int, BlockMode]
"""A block, and what of it."""
Sizes = NDArray[np.int64]
"""(blocks,) bytes."""


class ExpectedSlabs(NamedTuple):
    """Slabs that will be loaded."""

    forms: tuple[BlockMode, ...]
    """What is loaded of each block; `FULL` loads nothing."""
    blocks: int
    """Only the first so many blocks are loaded."""


class Slabs:
    """A source of sequences; satisfies :class:`giornata.packed.uses.KVSource`.

    A slab is gathered and dequantised once and kept: consecutive steps that are served by one entry move nothing, nor
    do sequences of equal regions and lengths. Keys and values have room for a sequence's own tokens in front of them.
    A block that asks for an expected slab waits until the loader has loaded it; any other slab is loaded by the asking
    thread.

    `own` are the tokens that a sequence computes where it takes keys and values: text, and the region's. What a
    `correction` knows is added. Where the family's batches are shared, entry and correction hold keys and values of the
    heads of this process alone; see :mod:`giornata_denoiser.blocks.narrowing`.

    On a device that keeps no slabs, what is kept is the entry as it is stored, and blocks gather it where they ask.
    """

    def __init__(
        self,
        entry: Entry,
        region: Region,
        own: int,
        family: ModelFamily,
        *,
        device: Device | None = None,
        waits: WaitTimer | None = None,
        trace: LaneTracer = UNTRACED,
        correction: Correction | None = None,
    ) -> None:
        self.entry, self.group = entry, family.group
        self.region = self.shown = region.on(family.device)
        """The region of the picture, and of what recorders are shown hidden states of: all, or a share."""
        hidden = self.region.outside
        if family.share is not None:
            _, hidden, self.shown = family.share.portion(self.region)
        self._index = {BlockMode.KV: self.region.outside, BlockMode.HIDDEN: hidden}
        """(outside,) int64 of each form."""
        self._own, self._family, self._device = own, family, device or Device()
        self._gathering = SlabBuilder(
            entry, self._index, own, family, device=self._device, correction=correction
        )
        self.shrinkage = self._gathering.shrinkage
        self._waits, self._trace = waits or WaitTimer(lambda: 0.0), trace
        self._slots: dict[Place, Future[tuple[Slab, TransferHandle]]] = {}
        """Made by whichever thread first asks for a slab or loads it."""
        self._begun: dict[Place, object] = {}
        """What some thread has begun to load, by that thread's mark. A dictionary sets a default in one go."""
        self._met: set[Place] = set()
        """Slabs that the computing stream has waited for: its order holds from then on."""
        self._expected: tuple[ExpectedSlabs, ...] = ()
        self._left = {
            mode: family.dtype.itemsize * len(self._index[mode]) * channels
            for mode, channels in entry.channels.items()
        }
        """Bytes that are still to be gathered, by form."""
        self._sizes: dict[BlockMode, Sizes] = {}

    @property
    def keeps(self) -> bool:
        """Whether what is written into a slab stays there."""
        return self._device.keeps

    def keys_values(self, block: int) -> DenseKV | KVPages:
        """(own + outside, heads, head_dim) each, the first `own` rows free; or as they are stored.

        Raises:
            LookupError: the entry has none.
        """
        slab = self._slab(block, BlockMode.KV)
        if isinstance(slab, DenseKV):
            return slab
        if not isinstance(slab, tuple):
            raise TypeError("keys and values were loaded as something else")
        key, value = slab
        deltas = (None if part.delta is None else part.delta.levels for part in slab)
        return KVPages(self._index[BlockMode.KV], key.stored.levels, value.stored.levels, *deltas)

    def part(self, block: int, part: str) -> Tensor:  # noqa: ARG002 - a block that is no attention has one part
        """(outside, channels); LookupError as above."""
        return self._alone(block, BlockMode.KV)

    def gathered(self, block: int) -> DenseKV:
        """:meth:`keys_values`, gathered: what is written there stays where slabs are kept."""
        slab = self._slab(block, BlockMode.KV)
        if isinstance(slab, tuple):
            return self._gathering.by_head(block, slab, 0)
        if not isinstance(slab, DenseKV):
            raise TypeError("keys and values were loaded as something else")
        return slab

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim); LookupError as above."""
        return self._alone(block, BlockMode.HIDDEN)

    def ask(self, block: int, mode: BlockMode) -> None:
        """Have a slab that some block will read here; LookupError as above."""
        self._slab(block, mode)

    def sizes(self, mode: BlockMode) -> Sizes:
        """Bytes of each block's slab as it is kept here, with room for the sequence's own. Not to be changed."""
        if mode not in self._sizes:
            self._sizes[mode] = self._kept_bytes(mode)
        return self._sizes[mode]

    def moving(self, mode: BlockMode) -> Sizes:
        """Bytes that have to move for each block's slab; 0 for one that is here. Not to be changed.

        Another thread may be loading: the array may change.
        """
        if not self._device.shares:
            return self._left[mode]
        kept = enumerate(self.entry.channels[mode].tolist())
        return np.array([self.load_bytes(block, mode) if some else 0 for block, some in kept], np.int64)

    def load_bytes(self, block: int, mode: BlockMode) -> int:
        """Bytes that have to move for a slab; 0 for one that is here."""
        slot = self._slots.get((block, mode))
        if slot is not None and slot.done() and slot.exception() is None and slot.result()[1].here:
            return 0
        return self._gathering.moved_bytes(block, mode)

    def has(self, block: int, mode: BlockMode) -> bool:
        """Whether the slab is here, or has failed, or some thread has begun to load it, or will."""
        return (block, mode) in self._begun or any(
            block < blocks and forms[block] is mode for forms, blocks in self._expected
        )

    def expect(self, *loads: ExpectedSlabs) -> None:
        """Announce that another thread will :meth:`load` these, and nothing else; blocks that ask before wait."""
        self._expected = loads

    def begin(self, block: int, mode: BlockMode) -> bool:
        """Whether the calling thread is to :meth:`load` the slab: none has begun to."""
        mark = object()
        return self._begun.setdefault((block, mode), mark) is mark

    def load(self, block: int, mode: BlockMode, pause: Callable[[], None] = lambda: None) -> TransferHandle:
        """Gather a slab that this thread has begun; an error is raised in the block that asks for the slab.

        `pause` is called before the slab is handed out.
        """
        slot = self._slots.setdefault((block, mode), Future())
        try:
            with (
                torch.inference_mode(),
                self._device.loading() as arrival,
                self._trace.span(
                    TraceLane.LOAD, f"block {block}", mode=str(mode), bytes=self.load_bytes(block, mode)
                ),
            ):
                slab = self._gathering.slab(block, mode)
                pause()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the block that asks raises it
            slot.set_exception(error)
            return TransferHandle()
        self._left[mode][block] = 0
        slot.set_result((slab, arrival))
        return arrival

    def error(self, block: int, mode: BlockMode) -> BaseException | None:
        """Why a slab that was loaded is not here; None where it is, or is still expected."""
        slot = self._slots.get((block, mode))
        return slot.exception() if slot is not None and slot.done() else None

    def fail(self, block: int, mode: BlockMode, error: Exception) -> None:
        """Have the block that asks for a slab raise `error`; one that is here stays."""
        slot = self._slots.setdefault((block, mode), Future())
        if not slot.done():
            slot.set_exception(error)

    def _alone(self, block: int, mode: BlockMode) -> Tensor:
        """(outside, channels): the only part that a block in `mode` takes."""
        slab = self._slab(block, mode)
        if isinstance(slab, tuple):
            return self._gathering.written(slab[0], mode)
        if not isinstance(slab, Tensor):
            raise TypeError("a block's only part was loaded as something else")
        return slab

    def _slab(self, block: int, mode: BlockMode) -> Slab:
        """What was loaded, once the current stream has been told to wait for it."""
        place = (block, mode)
        slot = self._slots.get(place)
        if slot is None or not slot.done():
            with self._waits.waiting(), self._trace.span(TraceLane.WAIT, f"block {block}", mode=str(mode)):
                if not self.has(block, mode) and self.begin(block, mode):
                    self.load(block, mode)
                slot = self._slots.setdefault(place, Future())
                slot.result()
        slab, arrival = slot.result()
        if place not in self._met:
            arrival.wait(*tensors(slab))
            self._met.add(place)
        return slab

    def _kept_bytes(self, mode: BlockMode) -> Sizes:
        """:meth:`sizes`: of slabs with room for the sequence's own, or of the entry as it is stored."""
        if self.keeps:
            attends = np.array([mode is BlockMode.KV and kept.key is not None for kept in self.entry.blocks])
            tokens = self._own * attends + len(self._index[mode])
            return self._family.dtype.itemsize * tokens * self.entry.channels[mode]
        return np.array(
            [
                sum(part.size_bytes for part in (*kept.taken(mode), *self._gathering.deltas(block, mode)))
                for block, kept in enumerate(self.entry.blocks)
            ],
            np.int64,
        )
