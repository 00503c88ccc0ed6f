"""Tensors in memory that leader and ranks map: made once, shown to each rank once, gone with the last view of it."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from giornata import unnamed

ALIGNMENT: Final = 64
"""Bytes: tensors begin at multiples of it."""


class TensorLocation(NamedTuple):
    """Where a tensor is."""

    slab: int
    offset: int
    shape: tuple[int, ...]
    dtype: str
    """As torch calls it: ``float32``."""


@dataclass(frozen=True)
class ArenaSlab:
    """Memory of an :class:`Arena`."""

    number: int
    size_bytes: int
    descriptor: int
    """The arena's: open while a tensor is there."""


class Arena:
    """The leader's memory that ranks map, by number. Safe in several threads.

    A slab ends with the last tensor that views it in this process; :meth:`gone` tells of that. Until then its file is
    open, so that a rank that starts later can map it, too.
    """

    def __init__(self) -> None:
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._slabs: dict[int, ArenaSlab] = {}
        self._at: dict[int, int] = {}
        """Numbers by address."""
        self._dead: deque[tuple[int, int]] = deque()
        """Number and address of slabs without a view: filled wherever the last view goes, also within the lock."""
        self._untold: list[int] = []

    def allocated(self, size_bytes: int) -> Tensor:
        """New memory, (bytes,) uint8. OSError where there is not so much."""
        return self.adopted(unnamed.allocated("giornata-pool", max(size_bytes, 1)), max(size_bytes, 1))

    def adopted(self, descriptor: int, size_bytes: int) -> Tensor:
        """The memory of a file that a rank has filled, (bytes,) uint8; the descriptor is the arena's from now on.

        Raises:
            OSError: it cannot be mapped, or is shorter.
        """
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                raise OSError(f"{size_bytes} bytes are expected of a file that has fewer")  # noqa: TRY301 - closed below
            held = unnamed.mapped(descriptor, size_bytes, touched=False)
            memory = _tensor(held)
        except BaseException:
            os.close(descriptor)
            raise
        address = memory.data_ptr()
        with self._lock:
            self._collect()
            slab = ArenaSlab(next(self._numbers), size_bytes, descriptor)
            self._slabs[slab.number], self._at[address] = slab, slab.number
        weakref.finalize(held, self._dead.append, (slab.number, address))
        return memory

    def place_of(self, tensor: Tensor) -> TensorLocation | None:
        """Where `tensor` is; None where it is in memory of this process alone, or not contiguous."""
        if not tensor.numel() or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        with self._lock:
            self._collect()
            base = tensor.untyped_storage().data_ptr()
            number = self._at.get(base)
        if number is None:
            return None
        return TensorLocation(number, tensor.data_ptr() - base, tuple(tensor.shape), dtype_name(tensor.dtype))

    def slab(self, number: int) -> ArenaSlab:
        """The slab of a number that :meth:`place_of` told; the tensor is still held."""
        with self._lock:
            return self._slabs[number]

    def gone(self) -> tuple[int, ...]:
        """Numbers of slabs that have ended since the last call."""
        with self._lock:
            self._collect()
            told, self._untold = tuple(self._untold), []
            return told

    def shared(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` in memory of its own that ranks map; itself where it is there."""
        return self.all_shared([tensor])[0]

    def all_shared(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The same of several, which lie one behind the other in one slab; equal objects once."""
        given = list(tensors)
        foreign = {id(each): each for each in given if self.place_of(each) is None and each.numel()}
        if not foreign:
            return given
        ends = layout(foreign.values())
        memory = self.allocated(ends[-1])
        copies: Mapping[int, Tensor] = {
            key: copied(each, memory, start)
            for (key, each), start in zip(foreign.items(), starts(ends, foreign.values()), strict=True)
        }
        return [copies.get(id(each), each) for each in given]

    def _collect(self) -> None:
        while self._dead:
            number, address = self._dead.popleft()
            os.close(self._slabs.pop(number).descriptor)
            if self._at.get(address) == number:
                del self._at[address]
            self._untold.append(number)


class MappedSlabs:
    """A rank's view of the leader's slabs."""

    def __init__(self) -> None:
        self._memory: dict[int, Tensor] = {}

    def map(self, number: int, size_bytes: int, descriptor: int) -> None:
        """Map a slab; the descriptor is closed. OSError if it cannot be."""
        try:
            self._memory[number] = mapped_tensor(descriptor, size_bytes)
        finally:
            os.close(descriptor)

    def forget(self, numbers: Iterable[int]) -> None:
        """Unmap slabs, each with the last tensor that views it."""
        for number in numbers:
            self._memory.pop(number, None)

    def memory(self, number: int) -> Tensor:
        """All of a slab, (bytes,) uint8."""
        return self._memory[number]

    def tensor(self, place: TensorLocation) -> Tensor:
        """What lies there."""
        return viewed(self._memory[place.slab], place)


def layout(tensors: Iterable[Tensor]) -> list[int]:
    """Where each of `tensors` ends, aligned, if they lie one behind the other."""
    ends: list[int] = []
    for tensor in tensors:
        begin = ends[-1] if ends else 0
        ends.append(-(-(begin + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
    return ends


def starts(ends: list[int], tensors: Iterable[Tensor]) -> list[int]:
    """Where each begins, for the same tensors as `ends`."""
    return [0, *ends[:-1]][: len(list(tensors))]


def copied(tensor: Tensor, memory: Tensor, offset: int) -> Tensor:
    """`tensor`, on any device, copied to byte `offset` of a slab."""
    place = TensorLocation(0, offset, tuple(tensor.shape), dtype_name(tensor.dtype))
    target = viewed(memory, place)
    target.copy_(tensor.detach())
    return target


def viewed(memory: Tensor, place: TensorLocation) -> Tensor:
    """The tensor at a place of a slab whose bytes are `memory`."""
    dtype: torch.dtype = getattr(torch, place.dtype)
    size = dtype.itemsize
    for side in place.shape:
        size *= side
    return memory[place.offset : place.offset + size].view(dtype).view(place.shape)


def dtype_name(dtype: torch.dtype) -> str:
    """As :attr:`TensorLocation.dtype`."""
    return str(dtype).removeprefix("torch.")


def mapped_tensor(descriptor: int, size_bytes: int) -> Tensor:
    """The memory of a file, (bytes,) uint8; the descriptor stays the caller's. OSError where it cannot be mapped."""
    return _tensor(unnamed.mapped(descriptor, size_bytes, touched=False))


def _tensor(held: mmap.mmap) -> Tensor:
    with torch.inference_mode(mode=False):  # else only who infers could write to it
        whole: Any = torch.frombuffer(held, dtype=torch.uint8)
        return whole  # type: ignore[no-any-return]  # a tensor
