"""Slabs: the parts of template entries that sequences take, on their way to the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.attention import DenseKV, KVPages
from giornata.packed.packing import UNTRACED, LaneTracer, Region, TraceLane
from giornata.packed.sharding import Shard
from giornata.planning.operations import is_all_or_nothing
from giornata.wire.models import PARTS
from giornata.wire.values import BlockMode
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, Correction, Entry, StoredTensor, shrinkage


class TransferHandle:
    """Tells when what was loaded is there: at once, where nothing moves."""

    @property
    def here(self) -> bool:
        """Return whether it is there now."""
        return True

    def finish(self) -> None:
        """Let the calling thread wait for it."""

    def wait(self, *tensors: Tensor) -> None:
        """Let the current stream wait for it; `tensors` are read there."""


class Device:
    """The device on which slabs are gathered: a CPU, unless a subclass says otherwise."""

    shares = False
    """Whether what was brought stays for other rows: rows of one entry move it once."""
    keeps = True
    """Whether slabs are gathered once and kept. Otherwise they stay as they are stored, and blocks gather them."""

    def bring(self, stored: StoredTensor) -> StoredTensor:
        """`stored` on the device; called within :meth:`loading`."""
        return stored

    def moved_bytes(self, stored: StoredTensor, slab_bytes: int) -> int:  # noqa: ARG002 - subclasses move `stored`
        """Return what has to move for `slab_bytes` that are gathered from `stored` now."""
        return slab_bytes

    def give_back(self) -> None:
        """Keep nothing that was brought: memory is out."""

    def produced(self) -> None:
        """Return what loading reads was made on the current stream: it comes after this point."""

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        """What is done within runs beside the computing; the arrival is of all of it, once the context is left."""
        yield TransferHandle()


class CacheSharder:
    """Narrows to what a process of `family` takes; everything stays as it is where that computes whole batches."""

    def __init__(self, family: ModelFamily) -> None:
        self._family = family
        self._entries: WeakKeyDictionary[Entry, Entry] = WeakKeyDictionary()

    def entry(self, whole: Entry | None) -> Entry | None:
        """Keys and values of the process's heads; hidden states as they are. One entry is narrowed once."""
        share = self._family.share
        if share is None or whole is None:
            return whole
        if whole not in self._entries:
            blocks = tuple(self._block(share, block, kept) for block, kept in enumerate(whole.blocks))
            narrow = replace(whole, blocks=blocks)
            self._entries[whole] = narrow.pinned() if self._family.device.type == "cuda" else narrow
        return self._entries[whole]

    def correction(self, whole: Correction, region: Region) -> Correction:
        """The same of a correction, and hidden states of the process's tokens alone; `region` is the row's."""
        share = self._family.share
        if share is None or whole.group:
            return whole
        outside = region.outside.cpu()
        own = torch.searchsorted(outside, share.portion(region.on(outside.device)).outside)
        deltas = {
            (block, part): delta.rows(own.to(delta.data.device))
            if part == "hidden"
            else self._by_head(share, block, delta)
            for (block, part), delta in whole.deltas.items()
        }
        return Correction(deltas, self._family.group)

    def fitting(self, row: Row) -> Row:
        """`row` without corrections of which another group has learned parts: it learns its own in a step in full."""
        fit = {"", self._family.group}
        if row.reuse.corrections is None or all(each.group in fit for each in row.reuse.corrections):
            return row
        return row.corrected(None)

    def _block(self, share: Shard, block: int, kept: CachedBlock) -> CachedBlock:
        if kept.key is None or kept.value is None:
            return kept
        key, value = (self._by_head(share, block, part) for part in (kept.key, kept.value))
        return replace(kept, key=key, value=value)

    def _by_head(self, share: Shard, block: int, stored: StoredTensor) -> StoredTensor:
        heads, sites = self._family.specs[block].heads, self._family.sites(block)
        narrow = stored.narrowed(share.channels(stored.channels, heads, sites))
        # What is copied to another device is copied from memory of its own.
        return narrow.each(torch.Tensor.contiguous) if self._family.device.type == "cuda" else narrow


class DeviceEntryPart(NamedTuple):
    """A part of an entry on the device, as it is stored."""

    stored: StoredTensor
    delta: StoredTensor | None
    """What a correction adds to its outside tokens, at the highest noise level."""
    factor: float = 1.0
    """How many times `delta` is added."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        return self.stored.tensors + (() if self.delta is None else self.delta.tensors)


Slab = DenseKV | Tensor | tuple[DeviceEntryPart, ...]
"""Gathered; or as it is stored, on a device that keeps no slabs: key and value, or a block's only part."""


class WaitTimer:
    """Adds up how long a step has waited for loads, by a clock of monotonic seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for a load within the context."""
        began = self._clock()
        try:
            yield
        finally:
            self.total_s += self._clock() - began


Place = tuple[int, BlockMode]
"""A block, and what of it."""
Sizes = NDArray[np.int64]
"""(blocks,) bytes."""


class Slabs:
    """A source of sequences; satisfies :class:`giornata.packed.packing.KVSource`.

    A slab is gathered and dequantised once and kept: consecutive steps that are served by one entry move nothing, nor
    do sequences of equal regions and lengths. Keys and values have room for a sequence's own tokens in front of them.
    A block that asks for an expected slab waits until the loader has loaded it; any other slab is loaded by the asking
    thread.

    `own` are the tokens that a sequence computes where it takes keys and values: text, and the region's. What a
    `correction` knows is added. Where the family's batches are shared, entry and correction hold keys and values of the
    heads of this process alone.

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
        """(outside,) int64 of each form, on the family's device."""
        self._own, self._family, self._device = own, family, device or Device()
        self._correction = correction
        self.shrinkage = 1.0 if is_all_or_nothing(family.specs) else shrinkage(entry.level)
        """The factor of the correction's differences at this noise level; a UNet's were not seen to shrink."""
        self._waits, self._trace = waits or WaitTimer(lambda: 0.0), trace
        self._slots: dict[Place, Future[tuple[Slab, TransferHandle]]] = {}
        """Made by whichever thread first asks for a slab or loads it."""
        self._begun: dict[Place, object] = {}
        """What some thread has begun to load, by that thread's mark. A dictionary sets a default in one go."""
        self._kv: dict[int, Slab] = {}
        self._hidden: dict[int, Slab] = {}
        """By block: slabs that the computing stream has waited for. Its order holds from then on."""
        self._expected: tuple[tuple[tuple[BlockMode, ...], int], ...] = ()
        self._left = {
            mode: family.dtype.itemsize * len(self._index[mode]) * channels
            for mode, channels in entry.channels.items()
        }
        """Bytes that are still to be gathered, by form."""
        self._sizes: dict[BlockMode, Sizes] = {}

    @property
    def keeps(self) -> bool:
        """Return whether what is written into a slab stays there."""
        return self._device.keeps

    def keys_values(self, block: int) -> DenseKV | KVPages:
        """(own + outside, heads, head_dim) each, the first `own` rows free; or as they are stored.

        Raises:
            LookupError: the entry has none.
        """
        slab = self._kv.get(block)
        if slab is None:
            slab = self._slab(block, BlockMode.KV)
        if not isinstance(slab, tuple):
            return _attended(slab)
        key, value = slab
        deltas = (None if part.delta is None else part.delta.levels for part in slab)
        return KVPages(self._index[BlockMode.KV], key.stored.levels, value.stored.levels, *deltas)

    def part(self, block: int, part: str) -> Tensor:  # noqa: ARG002 - a block that is no attention has one part
        """(outside, channels); LookupError as above."""
        slab = self._kv.get(block)
        return slab if isinstance(slab, Tensor) else self._alone(block, BlockMode.KV)

    def gathered(self, block: int) -> DenseKV:
        """:meth:`keys_values`, gathered: what is written there stays where slabs are kept."""
        slab = self._slab(block, BlockMode.KV)
        return self._by_head(block, slab, 0) if isinstance(slab, tuple) else _attended(slab)

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim); LookupError as above."""
        slab = self._hidden.get(block)
        return slab if isinstance(slab, Tensor) else self._alone(block, BlockMode.HIDDEN)

    def ask(self, block: int, mode: BlockMode) -> None:
        """Have a slab that some block will read here; LookupError as above."""
        self._slab(block, mode)

    def sizes(self, mode: BlockMode) -> Sizes:
        """Bytes of each block's slab as it is kept: with room for the sequence's own, or of the entry as it is stored.

        Not to be changed.
        """
        if mode not in self._sizes:
            blocks = self.entry.blocks
            if self.keeps:
                attends = np.array([mode is BlockMode.KV and kept.key is not None for kept in blocks])
                tokens = self._own * attends + len(self._index[mode])
                self._sizes[mode] = self._family.dtype.itemsize * tokens * self.entry.channels[mode]
            else:
                parts = [(*kept.taken(mode), *self._deltas(at, mode)) for at, kept in enumerate(blocks)]
                self._sizes[mode] = np.array([sum(part.size_bytes for part in of) for of in parts], np.int64)
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
        tokens = self._family.dtype.itemsize * len(self._index[mode])
        parts = self.entry.blocks[block].taken(mode)
        moved = sum(self._device.moved_bytes(part, tokens * part.shape[1]) for part in parts)
        return moved + sum(self._device.moved_bytes(delta, 0) for delta in self._deltas(block, mode))

    def has(self, block: int, mode: BlockMode) -> bool:
        """Return whether the slab is here, or has failed, or some thread has begun to load it, or will."""
        return (block, mode) in self._begun or any(
            block < blocks and forms[block] is mode for forms, blocks in self._expected
        )

    def expect(self, *loads: tuple[tuple[BlockMode, ...], int]) -> None:
        """Announce that another thread will :meth:`load` these, and nothing else; blocks that ask before wait.

        Each is what is loaded of each block, and of how many blocks; `FULL` loads nothing.
        """
        self._expected = loads

    def begin(self, block: int, mode: BlockMode) -> bool:
        """Return whether the calling thread is to :meth:`load` the slab: none has begun to."""
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
                slab = self._made(block, mode)
                pause()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the block that asks raises it
            slot.set_exception(error)
            return TransferHandle()
        self._left[mode][block] = 0
        slot.set_result((slab, arrival))
        return arrival

    def error(self, block: int, mode: BlockMode) -> BaseException | None:
        """Return why a slab that was loaded is not here; None where it is, or is still expected."""
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
            return self._written(slab[0], mode)
        if not isinstance(slab, Tensor):
            raise TypeError("a block's only part was loaded as something else")
        return slab

    def _slab(self, block: int, mode: BlockMode) -> Slab:
        """Return what was loaded, once the current stream has been told to wait for it."""
        met = self._kv if mode is BlockMode.KV else self._hidden
        if block in met:
            return met[block]
        place = (block, mode)
        slot = self._slots.get(place)
        if slot is None or not slot.done():
            with self._waits.waiting(), self._trace.span(TraceLane.WAIT, f"block {block}", mode=str(mode)):
                if not self.has(block, mode) and self.begin(block, mode):
                    self.load(block, mode)
                slot = self._slots.setdefault(place, Future())
                slot.result()
        slab, arrival = slot.result()
        arrival.wait(*_tensors(slab))
        met[block] = slab
        return slab

    def _made(self, block: int, mode: BlockMode) -> Slab:
        """What a block in `mode` takes; LookupError where the entry does not hold it."""
        brought = tuple(
            self._brought(block, name, part) for name, part in self.entry.blocks[block].named(mode)
        )
        if not brought:
            raise LookupError("the template's entry does not hold what the plan takes from it")
        if not self.keeps:
            return brought
        return (
            self._by_head(block, brought, self._own) if len(brought) > 1 else self._written(brought[0], mode)
        )

    def _brought(self, block: int, part: str, stored: StoredTensor) -> DeviceEntryPart:
        """A part on the device, and what is added to it."""
        delta = None if self._correction is None else self._correction.of(block, part)
        if delta is None:
            return DeviceEntryPart(self._device.bring(stored), None)
        added = self._device.bring(delta)
        if self.keeps:
            return DeviceEntryPart(self._device.bring(stored), added, self.shrinkage)
        return DeviceEntryPart(self._device.bring(stored), added.scaled(self.shrinkage))

    def _by_head(self, block: int, brought: tuple[DeviceEntryPart, ...], room: int) -> DenseKV:
        """Key and value, (room + outside, heads, head_dim) each, the first `room` rows free."""
        tokens, heads = room + len(self._index[BlockMode.KV]), self._family.heads(block)
        key, value = (self._written(part, BlockMode.KV, room).view(tokens, heads, -1) for part in brought)
        return DenseKV(key, value, room)

    def _written(self, brought: DeviceEntryPart, mode: BlockMode, room: int = 0) -> Tensor:
        """(room + outside, channels): the outside tokens of a part, corrected, behind room for others."""
        family, stored, index = self._family, brought.stored, self._index[mode]
        dtype = stored.data.dtype if stored.scale is None else family.dtype
        slab = torch.empty(room + len(index), stored.shape[1], dtype=dtype, device=family.device)
        stored.gather(index, slab[room:])
        if brought.delta is not None:
            brought.delta.add_to(slab[room:], brought.factor)
        return slab

    def _deltas(self, block: int, mode: BlockMode) -> list[StoredTensor]:
        """Return what a correction adds to a slab."""
        if self._correction is None:
            return []
        found = (self._correction.of(block, part) for part in PARTS[mode])
        return [delta for delta in found if delta is not None]


def _tensors(slab: Slab) -> tuple[Tensor, ...]:
    if isinstance(slab, DenseKV):
        return slab.key, slab.value
    return (slab,) if isinstance(slab, Tensor) else tuple(tensor for part in slab for tensor in part.tensors)


def _attended(slab: DenseKV | Tensor) -> DenseKV:
    if not isinstance(slab, DenseKV):
        raise TypeError("keys and values were loaded as something else")
    return slab
