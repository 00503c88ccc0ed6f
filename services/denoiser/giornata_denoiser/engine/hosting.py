"""What template runs record, on its way from a GPU to host memory: beside the computing, through pinned buffers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from giornata_denoiser.blocks.device import Device, TransferHandle
from giornata_denoiser.blocks.waits import WaitTimer
from giornata_denoiser.engine.loading import Accelerator
from giornata_denoiser.engine.weighing import ENTRIES_ON_DEVICE
from giornata_denoiser.rows.template import CachedBlock, Entry

BUFFERS: Final = 4
BUFFER_BYTES: Final = 8 << 20


class HostCopy:
    """Where entries are in host memory as they are recorded."""

    def take(self, entry: Entry) -> Entry:
        """`entry` in host memory; its values are there once :meth:`finish` has returned."""
        return entry

    def finish(self, entries: Sequence[Entry]) -> None:
        """Wait until what :meth:`take` returned is there; raises why one of `entries` never will be."""


class _HostCopyChunk(NamedTuple):
    arrival: TransferHandle
    source: Tensor
    """On the device; held until it has been read, since its memory is the computing stream's."""
    buffer: Tensor
    target: Tensor
    """On the host, as many bytes as the buffer holds."""


class AsyncHostCopy(HostCopy):
    """Moves entries in a thread of its own, by the copy stream of `device` and a ring of buffers, pinned or not.

    `waits` hears how long the engine waits.
    """

    def __init__(self, device: Device, waits: WaitTimer, *, pin: bool) -> None:
        self._device, self._waits, self._pin = device, waits, pin
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hosting")
        self._moving: deque[tuple[Entry, Future[None]]] = deque()
        self._errors: WeakKeyDictionary[Entry, BaseException] = WeakKeyDictionary()
        self._ring: list[Tensor] = []
        self._turn = 0

    def take(self, entry: Entry) -> Entry:
        """See :meth:`HostCopy.take`; waits while too many entries are on the device."""
        moves: list[tuple[Tensor, Tensor]] = []
        hosted = Entry(entry.level, tuple(_hosted(kept, moves) for kept in entry.blocks))
        self._device.produced()
        self._moving.append((hosted, self._thread.submit(self._move, moves)))
        self._wait(ENTRIES_ON_DEVICE - 1)
        return hosted

    def finish(self, entries: Sequence[Entry]) -> None:
        """See :meth:`HostCopy.finish`."""
        self._wait(0)
        for entry in entries:
            if entry in self._errors:
                raise self._errors[entry]

    def _wait(self, left: int) -> None:
        with self._waits.waiting():
            while len(self._moving) > left:
                entry, moved = self._moving.popleft()
                if (error := moved.exception()) is not None:
                    self._errors[entry] = error

    def _move(self, moves: list[tuple[Tensor, Tensor]]) -> None:
        """Fill the second tensor of each pair from the first; both are let go of as soon as that is done."""
        under_way: deque[_HostCopyChunk] = deque()
        with torch.inference_mode():
            while moves:
                for source, target in _pieces(*moves.pop()):
                    if len(under_way) == BUFFERS:
                        _land(under_way.popleft())
                    under_way.append(self._sent(source, target))
            while under_way:
                _land(under_way.popleft())

    def _sent(self, source: Tensor, target: Tensor) -> _HostCopyChunk:
        if not self._ring:
            self._ring = [
                torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=self._pin) for _ in range(BUFFERS)
            ]
        buffer = self._ring[self._turn % BUFFERS][: len(source)]
        self._turn += 1
        with self._device.loading() as arrival:
            buffer.copy_(source, non_blocking=True)
        return _HostCopyChunk(arrival, source, buffer, target)


def hosting_for(device: torch.device, waits: WaitTimer) -> HostCopy:
    """How entries that are recorded on `device` get to host memory."""
    if device.type != "cuda":
        return HostCopy()
    return AsyncHostCopy(Accelerator(device, budget_bytes=0), waits, pin=True)


def _hosted(kept: CachedBlock, moves: list[tuple[Tensor, Tensor]]) -> CachedBlock:
    """The same on the host, not filled yet; `moves` are to fill it."""

    def moved(source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype)
        moves.append((source.contiguous(), target))
        return target

    return kept.each(moved)


def _pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both, which are contiguous, as bytes, in pieces that fit a buffer."""
    parts = (tensor.view(-1).view(torch.uint8) for tensor in (source, target))
    first, second = (torch.split(part, BUFFER_BYTES) for part in parts)
    return zip(first, second, strict=True)


def _land(piece: _HostCopyChunk) -> None:
    piece.arrival.finish()
    piece.target.copy_(piece.buffer)
