"""Slabs: what sequences take from one entry, gathered to their outside tokens on the engine's device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from giornata.packed.attention import Outside
from giornata.packed.region import Region
from giornata.packed.tracing import UNTRACED, Lane, Tracing
from giornata.wire.values import Mode
from giornata_denoiser.blocks.device import Arrival, Device, Here, Host
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.stored import Stored
from giornata_denoiser.rows.template import Entry

Slab = Outside | Tensor


class Corrector(Protocol):
    """What is added to what a template kept."""

    def of(self, block: int, part: str) -> Stored | None:
        """What is added to a block's `key`, `value` or `hidden`, (outside, channels)."""


class Waits:
    """How long a step has waited for loads.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.total_s = 0.0

    def reset(self) -> None:
        """A step begins."""
        self.total_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For a load."""
        began = self._clock()
        try:
            yield
        finally:
            self.total_s += self._clock() - began


class Slabs:
    """A source of sequences; satisfies :class:`giornata.packed.uses.Source`.

    A slab is gathered and dequantised once and kept: consecutive steps that are served by one entry move nothing, nor
    do sequences of equal regions and lengths. Keys and values have room for a sequence's own tokens in front of them.
    One that is expected is waited for, until whoever loads ahead has loaded it; another is loaded by whoever asks.

    Args:
        entry: of the template.
        region: of the rows.
        own: tokens that a sequence computes where it takes keys and values: text, and the region's.
        family: whose heads, dtype and device the slabs have.
        device: how they get there.
        waits: told how long who asks had to wait.
        trace: told of every load.
        correction: of the sequence, where a step of it has been computed in full.
    """

    def __init__(
        self,
        entry: Entry,
        region: Region,
        own: int,
        family: Family,
        *,
        device: Device | None = None,
        waits: Waits | None = None,
        trace: Tracing = UNTRACED,
        correction: Corrector | None = None,
    ) -> None:
        self.entry = entry
        self._correction = correction
        self._index = region.outside
        self._own, self._family, self._device = own, family, device or Host()
        self._waits, self._trace = waits or Waits(lambda: 0.0), trace
        self._slabs: dict[tuple[int, Mode], Future[tuple[Slab, Arrival]]] = {}

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

    def size_bytes(self, block: int, mode: Mode) -> int:
        """Of a slab as it is kept here; 0 in a mode that takes nothing."""
        return sum(self._gathered_bytes(part) for part in self.entry.blocks[block].taken(mode))

    def load_bytes(self, block: int, mode: Mode) -> int:
        """What has to move for a slab; 0 for one that is here."""
        slot = self._slabs.get((block, mode))
        if slot is not None and slot.done() and slot.exception() is None and slot.result()[1].here:
            return 0
        parts = self.entry.blocks[block].taken(mode)
        return sum(self._device.moved_bytes(part, self._gathered_bytes(part)) for part in parts)

    def has(self, block: int, mode: Mode) -> bool:
        """Whether the slab is here, or expected."""
        return (block, mode) in self._slabs

    def expect(self, block: int, mode: Mode) -> None:
        """Somebody will :meth:`load` it; who asks before waits."""
        self._slabs[block, mode] = Future()

    def drop(self, block: int, mode: Mode) -> None:
        """Nobody will load what was expected."""
        del self._slabs[block, mode]

    def load(self, block: int, mode: Mode, pause: Callable[[], None] = lambda: None) -> Arrival:
        """Gather an expected slab, in any thread; what goes wrong is raised to who asks for it.

        `pause` is called before the slab is handed out.
        """
        slot = self._slabs[block, mode]
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
            slot.set_result((slab, arrival))
        except Exception as error:  # noqa: BLE001 - a thread's edge: who asks for the slab is told
            slot.set_exception(error)
            return Here()
        return arrival

    def _slab(self, block: int, mode: Mode) -> tuple[Slab, Arrival]:
        slot = self._slabs.get((block, mode))
        if slot is not None and slot.done():
            return slot.result()
        with self._waits.waiting(), self._trace.span(Lane.WAIT, f"block {block}", mode=str(mode)):
            if slot is None:
                self.expect(block, mode)
                self.load(block, mode)
            return self._slabs[block, mode].result()

    def _gathered_bytes(self, part: Stored) -> int:
        return self._family.dtype.itemsize * len(self._index) * part.shape[1]

    def _gather(self, block: int, mode: Mode) -> Slab:
        kept = self.entry.blocks[block]
        if mode is Mode.HIDDEN:
            return self._gathered(block, "hidden", kept.hidden, 0)
        key, value = (
            _heads(self._gathered(block, name, part, self._own), self._family.heads)
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
            delta.add_to(slab[room:])
        return slab


def _heads(slab: Tensor, heads: int) -> Tensor:
    """(tokens, heads * head_dim) → (tokens, heads, head_dim)."""
    return slab.view(len(slab), heads, -1)
