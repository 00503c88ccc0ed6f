"""Slabs: what sequences take from one entry, gathered to their outside tokens on the engine's device, and corrected."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.attention import Outside
from giornata.packed.region import Region
from giornata.packed.tracing import UNTRACED, Lane, Tracing
from giornata.planning.specs import PARTS
from giornata.wire.values import Mode
from giornata_denoiser.blocks.device import Arrival, Device
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.stored import Stored
from giornata_denoiser.rows.template import Entry

Slab = Outside | Tensor
Place = tuple[int, Mode]
"""A block, and what of it."""
Sizes = NDArray[np.int64]
"""(blocks,) bytes."""


class Waits:
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


class Expected(NamedTuple):
    """Slabs that will be loaded."""

    forms: tuple[Mode, ...]
    """Of every block; `FULL` for nothing."""
    blocks: int
    """Of so many, from the first one."""


class Slabs:
    """A source of sequences; satisfies :class:`giornata.packed.uses.Source`.

    A slab is gathered and dequantised once and kept: consecutive steps that are served by one entry move nothing, nor
    do sequences of equal regions and lengths. Keys and values have room for a sequence's own tokens in front of them.
    A block that asks for an expected slab waits until the loader has loaded it; any other slab is loaded by the asking
    thread.

    `own` are the tokens that a sequence computes where it takes keys and values: text, and the region's. What a
    `correction` knows is added.
    """

    def __init__(
        self,
        entry: Entry,
        region: Region,
        own: int,
        family: ModelFamily,
        *,
        device: Device | None = None,
        waits: Waits | None = None,
        trace: Tracing = UNTRACED,
        correction: Correction | None = None,
    ) -> None:
        self.entry = entry
        self._correction = correction
        self._index = region.on(family.device).outside
        self._own, self._family, self._device = own, family, device or Device()
        self._waits, self._trace = waits or Waits(lambda: 0.0), trace
        self._slots: dict[Place, Future[tuple[Slab, Arrival]]] = {}
        """Made by whichever thread first asks for a slab or loads it."""
        self._begun: dict[Place, object] = {}
        """What some thread has begun to load, by that thread's mark. A dictionary sets a default in one go."""
        self._expected: tuple[Expected, ...] = ()
        tokens, itemsize = self._index.shape[0], family.dtype.itemsize
        self._sizes = {
            Mode.KV: itemsize * (tokens + own) * entry.channels[Mode.KV],
            Mode.HIDDEN: itemsize * tokens * entry.channels[Mode.HIDDEN],
        }
        self._left = {mode: itemsize * tokens * channels for mode, channels in entry.channels.items()}
        """Bytes that are still to be gathered, by form."""

    def keys_values(self, block: int) -> Outside:
        """(own + outside, heads, head_dim) each, the first `own` rows free.

        Raises:
            LookupError: the entry has none.
        """
        slab, arrival = self._slab(block, Mode.KV)
        if not isinstance(slab, Outside):
            raise TypeError("keys and values were loaded as something else")
        arrival.wait(slab.key, slab.value)
        return slab

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim); LookupError as above."""
        slab, arrival = self._slab(block, Mode.HIDDEN)
        if not isinstance(slab, Tensor):
            raise TypeError("a block's input was loaded as something else")
        arrival.wait(slab)
        return slab

    def sizes(self, mode: Mode) -> Sizes:
        """Bytes of each block's slab as it is kept here, with room for the sequence's own. Not to be changed."""
        return self._sizes[mode]

    def moving(self, mode: Mode) -> Sizes:
        """Bytes that have to move for each block's slab; 0 for one that is here. Not to be changed.

        Another thread may be loading: the array may change.
        """
        if not self._device.shares:
            return self._left[mode]
        kept = enumerate(self.entry.channels[mode].tolist())
        return np.array([self.load_bytes(block, mode) if some else 0 for block, some in kept], np.int64)

    def load_bytes(self, block: int, mode: Mode) -> int:
        """Bytes that have to move for a slab; 0 for one that is here."""
        slot = self._slots.get((block, mode))
        if slot is not None and slot.done() and slot.exception() is None and slot.result()[1].here:
            return 0
        parts = self.entry.blocks[block].taken(mode)
        moved = sum(self._device.moved_bytes(part, self._gathered_bytes(part)) for part in parts)
        return moved + sum(self._device.moved_bytes(delta, 0) for delta in self._deltas(block, mode))

    def has(self, block: int, mode: Mode) -> bool:
        """Whether the slab is here, or expected, or has failed."""
        return self._awaited((block, mode))

    def expect(self, *loads: Expected) -> None:
        """Announce that another thread will :meth:`load` these, and nothing else; blocks that ask before wait."""
        self._expected = loads

    def begin(self, block: int, mode: Mode) -> bool:
        """Whether the calling thread is to :meth:`load` the slab: none has begun to."""
        mark = object()
        return self._begun.setdefault((block, mode), mark) is mark

    def load(self, block: int, mode: Mode, pause: Callable[[], None] = lambda: None) -> Arrival:
        """Gather a slab that this thread has begun; an error is raised in the block that asks for the slab.

        `pause` is called before the slab is handed out.
        """
        slot = self._slots.setdefault((block, mode), Future())
        try:
            with (
                torch.inference_mode(),
                self._device.loading() as arrival,
                self._trace.span(
                    Lane.LOAD, f"block {block}", mode=str(mode), bytes=self.load_bytes(block, mode)
                ),
            ):
                slab = self._gather(block, mode)
                pause()
        except Exception as error:  # noqa: BLE001 - a thread's edge: the block that asks raises it
            slot.set_exception(error)
            return Arrival()
        self._left[mode][block] = 0
        slot.set_result((slab, arrival))
        return arrival

    def error(self, block: int, mode: Mode) -> BaseException | None:
        """Why a slab that was loaded is not here; None where it is, or is still expected."""
        slot = self._slots.get((block, mode))
        return slot.exception() if slot is not None and slot.done() else None

    def fail(self, block: int, mode: Mode, error: Exception) -> None:
        """Have the block that asks for a slab raise `error`; one that is here stays."""
        slot = self._slots.setdefault((block, mode), Future())
        if not slot.done():
            slot.set_exception(error)

    def _awaited(self, place: Place) -> bool:
        """Whether some thread has begun to load it, or will."""
        block, mode = place
        return place in self._begun or any(
            block < blocks and forms[block] is mode for forms, blocks in self._expected
        )

    def _slab(self, block: int, mode: Mode) -> tuple[Slab, Arrival]:
        place = (block, mode)
        slot = self._slots.get(place)
        if slot is not None and slot.done():
            return slot.result()
        with self._waits.waiting(), self._trace.span(Lane.WAIT, f"block {block}", mode=str(mode)):
            if not self._awaited(place) and self.begin(block, mode):
                self.load(block, mode)
            return self._slots.setdefault(place, Future()).result()

    def _deltas(self, block: int, mode: Mode) -> Iterator[Stored]:
        """What a correction adds to a slab."""
        if self._correction is not None:
            deltas = (self._correction.of(block, part) for part in PARTS[mode])
            yield from (delta for delta in deltas if delta is not None)

    def _gathered_bytes(self, part: Stored) -> int:
        return self._family.dtype.itemsize * len(self._index) * part.shape[1]

    def _gather(self, block: int, mode: Mode) -> Slab:
        kept = self.entry.blocks[block]
        if mode is Mode.HIDDEN:
            return self._gathered(block, "hidden", kept.hidden, 0)
        tokens, heads = self._own + len(self._index), self._family.specs[block].heads
        key, value = (
            self._gathered(block, name, part, self._own).view(tokens, heads, -1)
            for name, part in (("key", kept.key), ("value", kept.value))
        )
        return Outside(key, value, self._own)

    def _gathered(self, block: int, part: str, stored: Stored | None, room: int) -> Tensor:
        if stored is None:
            raise LookupError("the template's entry does not hold what the plan takes from it")
        family = self._family
        slab = torch.empty(room + len(self._index), stored.shape[1], dtype=family.dtype, device=family.device)
        self._device.reads(self._index)
        self._device.bring(stored).gather(self._index, slab[room:])
        delta = None if self._correction is None else self._correction.of(block, part)
        if delta is not None:
            self._device.reads(*delta.tensors)
            self._device.bring(delta).add_to(slab[room:])
        return slab
