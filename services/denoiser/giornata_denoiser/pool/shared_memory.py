"""Rows and templates in memory that leader and ranks map."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from giornata import frames
from giornata_denoiser.rows.parts import TaylorExpansion
from giornata_denoiser.rows.row import Row

ALIGNMENT: Final = 64
"""Bytes: tensors begin at multiples of it."""


class TensorLocation(NamedTuple):
    """The location of a tensor in shared memory."""

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
        return self.adopted(frames.allocate_memory("giornata-pool", max(size_bytes, 1)), max(size_bytes, 1))

    def adopted(self, descriptor: int, size_bytes: int) -> Tensor:
        """The memory of a file that a rank has filled, (bytes,) uint8; the descriptor is the arena's from now on.

        Raises:
            OSError: it cannot be mapped, or is shorter.
        """
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                raise OSError(f"{size_bytes} bytes are expected of a file that has fewer")  # noqa: TRY301 - closed below
            held = frames.map_memory(descriptor, size_bytes, touched=False)
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
        """Return where `tensor` is; None where it is in memory of this process alone, or not contiguous."""
        if not tensor.numel() or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        with self._lock:
            self._collect()
            base = tensor.untyped_storage().data_ptr()
            number = self._at.get(base)
        if number is None:
            return None
        return TensorLocation(number, tensor.data_ptr() - base, tuple(tensor.shape), dtype_name(tensor.dtype))

    def number_of(self, memory: Tensor) -> int:
        """Return the number of the slab whose memory this is; ValueError where it is not this arena's."""
        place = self.place_of(memory)
        if place is None:
            raise ValueError("received memory that ranks do not map")
        return place.slab

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

    def _collect(self) -> None:
        while self._dead:
            number, address = self._dead.popleft()
            os.close(self._slabs.pop(number).descriptor)
            if self._at.get(address) == number:
                del self._at[address]
            self._untold.append(number)


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
    return _tensor(frames.map_memory(descriptor, size_bytes, touched=False))


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT


def _tensor(held: mmap.mmap) -> Tensor:
    with torch.inference_mode(mode=False):  # else only who infers could write to it
        whole: Any = torch.frombuffer(held, dtype=torch.uint8)
        return whole  # type: ignore[no-any-return]  # a tensor


class TensorPlaces:
    """The places of the tensors of one message: in the slabs of `arena` that have them, else in a file of its own."""

    def __init__(self, arena: Arena | None = None) -> None:
        self._arena = arena
        self._found: dict[int, tuple[Tensor, TensorLocation]] = {}
        """By identity."""
        self.size_bytes = 0
        """Of the file, which the places call slab 0."""

    def place(self, tensor: Tensor) -> TensorLocation:
        """Return where the message's reader finds `tensor`."""
        if id(tensor) not in self._found:
            place = None if self._arena is None else self._arena.place_of(tensor)
            if place is None:
                place = TensorLocation(0, self.size_bytes, tuple(tensor.shape), dtype_name(tensor.dtype))
                self.size_bytes += _aligned(max(tensor.nbytes, 1))
            self._found[id(tensor)] = tensor, place
        return self._found[id(tensor)][1]

    @property
    def slabs(self) -> frozenset[int]:
        """Slabs of the arena with tensors of the message."""
        return frozenset(place.slab for _, place in self._found.values() if place.slab)

    def tensor(self, place: TensorLocation, own: Tensor) -> Tensor:
        """The tensor at a place that :meth:`place` told; `own` are the bytes of the message's file."""
        if not place.slab:
            return viewed(own, place)
        return next(tensor for tensor, known in self._found.values() if known == place)

    def written(self) -> int | None:
        """A descriptor of the file, the caller's to close; None where it would be empty. OSError without memory."""
        if not self.size_bytes:
            return None
        descriptor = frames.allocate_memory("giornata-pool", self.size_bytes)
        try:
            memory = mapped_tensor(descriptor, self.size_bytes)
            for tensor, place in self._found.values():
                if not place.slab:
                    viewed(memory, place).copy_(tensor.detach())
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


VERSIONS: Final = 3
"""States of a row that its slab holds: the last one that is known, that in flight, and the one ordered ahead."""


class ExpansionHead(NamedTuple):
    """A row's :class:`TaylorExpansion` but for its factors, of which there are so many."""

    began: int
    step: int
    factors: int

    @classmethod
    def of(cls, row: Row) -> ExpansionHead | None:
        """That of what `row` remembers; None where it remembers nothing."""
        known = row.cached
        return None if known is None else cls(known.began, known.step, len(known.factors))


StateLayout = tuple[TensorLocation | None, ...]
"""Where the latent, what the sampler remembers, the generator and a step cache's factors lie; None for what is not."""


@dataclass(frozen=True)
class StateRing:
    """The states of a row in its slab, at its beginning: that of a step is in the place of its number."""

    states: tuple[StateLayout, ...]
    size_bytes: int

    @classmethod
    def of(cls, row: Row) -> StateRing:
        """Room for what a step changes of `row`."""
        wide = torch.promote_types(row.latent.dtype, torch.float32)
        remembered, orders = row.track.remembered, 0 if row.step_cache is None else row.step_cache.order + 1
        memory = torch.empty((remembered, *row.latent.shape), dtype=wide, device="meta")
        shape = len(row.inputs.prompts), row.computed_tokens, row.latent.shape[1]
        factors = [torch.empty(shape, dtype=torch.float32, device="meta")] * orders
        offset, states = 0, []
        for _ in range(VERSIONS):
            places: list[TensorLocation | None] = []
            for part in (row.latent, memory if remembered else None, row.generator, *factors):
                if part is None:
                    places.append(None)
                else:
                    places.append(TensorLocation(0, offset, tuple(part.shape), dtype_name(part.dtype)))
                    offset += _aligned(part.nbytes)
            states.append(tuple(places))
        return cls(tuple(states), offset)

    def write(self, slab: Tensor, row: Row) -> None:
        """Put the state of `row` there, which may be on a device; that is waited for."""
        factors = () if row.cached is None else row.cached.factors
        parts = (row.latent, row.memory, row.generator, *factors)
        for place, part in zip(self.states[row.step % VERSIONS], parts, strict=False):
            if place is not None and part is not None:
                viewed(slab, place).copy_(part)

    def read(self, slab: Tensor, row: Row, step: int, known: ExpansionHead | None = None) -> Row:
        """`row` at `step`, whose state is there: views of the slab, which last until three steps later.

        `known` is what its step cache remembers.
        """
        latent, memory, generator, *factors = (
            None if place is None else viewed(slab, place) for place in self.states[step % VERSIONS]
        )
        rule = row.step_cache
        if rule is not None:
            held = tuple(
                factor for factor in factors[: 0 if known is None else known.factors] if factor is not None
            )
            rule = replace(rule, known=known and TaylorExpansion(known.began, known.step, held))
        return replace(
            row,
            step=step,
            latent=row.latent if latent is None else latent,
            memory=memory if step else None,
            generator=generator,
            step_cache=rule,
        )


def bare(row: Row) -> Row:
    """`row` as ranks get it, once: without what orders tell of it, and without what its steps have left."""
    return replace(
        row,
        degree=0,
        reuse=replace(row.reuse, corrections=None, taught=False),
        records=row.records and replace(row.records, entries=()),
        step_cache=row.step_cache and replace(row.step_cache, known=None),
    )
