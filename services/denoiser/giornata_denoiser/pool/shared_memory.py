"""Rows and templates in memory that leader and ranks map."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, NamedTuple, TypeVar

import torch
from torch import Tensor

from giornata import anonymous_memory
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_denoiser.templates.identity import HostMemory

# Tensors in memory that leader and ranks map: made once, shown to each rank once, gone with the last view
# of it.


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
        return self.adopted(
            anonymous_memory.allocated("giornata-pool", max(size_bytes, 1)), max(size_bytes, 1)
        )

    def adopted(self, descriptor: int, size_bytes: int) -> Tensor:
        """The memory of a file that a rank has filled, (bytes,) uint8; the descriptor is the arena's from now on.

        Raises:
            OSError: it cannot be mapped, or is shorter.
        """
        try:
            if os.fstat(descriptor).st_size < size_bytes:
                raise OSError(f"{size_bytes} bytes are expected of a file that has fewer")  # noqa: TRY301 - closed below
            held = anonymous_memory.mapped(descriptor, size_bytes, touched=False)
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
        """Return what lies there."""
        return viewed(self._memory[place.slab], place)


def layout(tensors: Iterable[Tensor]) -> list[int]:
    """Return where each of `tensors` ends, aligned, if they lie one behind the other."""
    ends: list[int] = []
    for tensor in tensors:
        begin = ends[-1] if ends else 0
        ends.append(-(-(begin + tensor.nbytes) // ALIGNMENT) * ALIGNMENT)
    return ends


def starts(ends: list[int], tensors: Iterable[Tensor]) -> list[int]:
    """Return where each begins, for the same tensors as `ends`."""
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
    return _tensor(anonymous_memory.mapped(descriptor, size_bytes, touched=False))


def _tensor(held: mmap.mmap) -> Tensor:
    with torch.inference_mode(mode=False):  # else only who infers could write to it
        whole: Any = torch.frombuffer(held, dtype=torch.uint8)
        return whole  # type: ignore[no-any-return]  # a tensor


# Rows, templates and corrections as ranks get them: structure by a message, tensors by their place in
# shared memory.
#
# Only a leader writes such messages, and only its own ranks read them.


KEPT: Final = (CachedTemplate, Correction)
"""What rows share: a rank has one object of each, whatever row it came with."""
VERSIONS: Final = 3
"""States of a row that its slab holds: the last one that is known, that in flight, and the one ordered ahead."""


class PackedObject(NamedTuple):
    """An object without its tensors."""

    data: bytes
    slabs: frozenset[int]
    """Where they are."""
    kept: tuple[object, ...]
    """What it refers to of :data:`KEPT`, in any order."""
    memory: Tensor | None = None
    """Holds the slab that was made for it; None where all was in shared memory."""


class ObjectPacker:
    """Packs objects; `numbers` gives each object of :data:`KEPT` its number, by identity."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def packed(self, thing: object, numbers: Mapping[int, int]) -> PackedObject:
        """`thing`, and its tensors in shared memory; those that are elsewhere are copied to a new slab.

        `numbers` are by ``id``. Objects of :data:`KEPT` below `thing` must have one.
        """
        found: dict[int, Tensor] = {}
        kept: dict[int, object] = {}
        _Pickler(io.BytesIO(), thing, found, kept, {}, {}).dump(thing)
        foreign = [each for each in found.values() if self._arena.place_of(each) is None and each.numel()]
        made: dict[int, Tensor] = {}
        target: Tensor | None = None
        if foreign:
            ends = layout(foreign)
            target = self._arena.allocated(ends[-1])
            for each, start in zip(foreign, starts(ends, foreign), strict=True):
                made[id(each)] = copied(each, target, start)
        places: dict[int, TensorLocation | None] = {
            key: self._arena.place_of(made.get(key, each)) for key, each in found.items()
        }
        data = io.BytesIO()
        _Pickler(data, thing, found, kept, places, numbers).dump(thing)
        slabs = frozenset(place.slab for place in places.values() if place is not None)
        return PackedObject(data.getvalue(), slabs, tuple(kept.values()), target)


class _Pickler(pickle.Pickler):
    def __init__(  # noqa: PLR0917 - its own parts
        self,
        file: io.BytesIO,
        whole: object,
        found: dict[int, Tensor],
        kept: dict[int, object],
        places: Mapping[int, TensorLocation | None],
        numbers: Mapping[int, int],
    ) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._whole, self._found, self._kept = whole, found, kept
        self._places, self._numbers = places, numbers

    def persistent_id(self, obj: Any) -> object:
        if isinstance(obj, KEPT) and obj is not self._whole:
            self._kept[id(obj)] = obj
            return ("kept", self._numbers.get(id(obj)))
        if isinstance(obj, Tensor):
            self._found[id(obj)] = obj
            place = self._places.get(id(obj))
            if place is None:  # without elements
                return ("empty", tuple(obj.shape), obj.dtype)
            return ("at", tuple(place))
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, mapped: MappedSlabs, kept: Mapping[int, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._mapped, self._kept = mapped, kept

    def persistent_load(self, pid: Any) -> object:
        match pid:
            case ("kept", number):
                return self._kept[number]
            case ("empty", shape, dtype):
                return torch.empty(shape, dtype=dtype)
            case ("at", place):
                return self._mapped.tensor(TensorLocation(*place))
        raise pickle.UnpicklingError(f"received the reference {pid!r}")


def unpacked(data: bytes, mapped: MappedSlabs, kept: Mapping[int, object]) -> Any:
    """The inverse of :meth:`ObjectPacker.packed`, in a rank; `kept` are by number."""
    return _Unpickler(data, mapped, kept).load()


@dataclass(frozen=True)
class RowStateLayout:
    """The layout of one state of a row in its slab."""

    latent: TensorLocation
    memory: TensorLocation | None
    generator: TensorLocation | None


@dataclass(frozen=True)
class StateRing:
    """The states of a row in its slab, at its beginning: that of a step is in the place of its number."""

    states: tuple[RowStateLayout, ...]
    size_bytes: int

    @classmethod
    def of(cls, row: Row) -> StateRing:
        """Room for what a step changes of `row`."""
        wide = torch.promote_types(row.latent.dtype, torch.float32)
        remembered = row.track.remembered
        memory = (
            torch.empty((remembered, *row.latent.shape), dtype=wide, device="meta") if remembered else None
        )
        offset, states = 0, []
        for _ in range(VERSIONS):
            places: list[TensorLocation | None] = []
            for part in (row.latent, memory, row.generator):
                if part is None:
                    places.append(None)
                    continue
                name = str(part.dtype).removeprefix("torch.")
                places.append(TensorLocation(0, offset, tuple(part.shape), name))
                offset += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
            latent, *others = places
            if latent is None:
                raise ValueError(f"row {row.key} has no latent")
            states.append(RowStateLayout(latent, *others))
        return cls(tuple(states), offset)

    def write(self, slab: Tensor, row: Row) -> None:
        """Put the state of `row` there, which may be on a device; that is waited for."""
        state = self.states[row.step % VERSIONS]
        for place, part in zip(
            (state.latent, state.memory, state.generator),
            (row.latent, row.memory, row.generator),
            strict=True,
        ):
            if place is not None and part is not None:
                viewed(slab, place).copy_(part)

    def read(self, slab: Tensor, row: Row, step: int) -> Row:
        """`row` at `step`, whose state is there: views of the slab, which last until three steps later."""
        state = self.states[step % VERSIONS]
        memory = None if state.memory is None or not step else viewed(slab, state.memory)
        generator = None if state.generator is None else viewed(slab, state.generator)
        return replace(row, step=step, latent=viewed(slab, state.latent), memory=memory, generator=generator)


def bare(row: Row) -> Row:
    """`row` as ranks get it, once: without what orders tell of it, and without what its steps have left."""
    return replace(row, entries=(), corrections=None, begun=False, taught=False)


def kept_of(row: Row) -> Sequence[object]:
    """Return what `row` refers to of :data:`KEPT`."""
    return (*(() if row.template is None else (row.template,)), *(row.corrections or ()))


# Templates and corrections in memory that all ranks map: put there once, when they are kept.


T = TypeVar("T")


def shared_memory(arena: Arena) -> HostMemory:
    """The memory of `arena`: what lies there already, as ranks leave it, stays where it is. OSError without room."""

    def recording(given: CachedTemplate) -> CachedTemplate:
        return _shared(arena, given, _each_of_recording)

    def correction(given: Correction) -> Correction:
        return _shared(arena, given, _each_of_correction)

    return HostMemory(recording, correction)


def _shared(arena: Arena, given: T, each: Callable[[T, Callable[[Tensor], Tensor]], T]) -> T:
    found: list[Tensor] = []

    def seen(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    each(given, seen)
    if all(arena.place_of(tensor) is not None for tensor in found):
        return given
    copies = dict(zip(map(id, found), arena.all_shared(found), strict=True))
    return each(given, lambda tensor: copies[id(tensor)])


def _each_of_recording(given: CachedTemplate, change: Callable[[Tensor], Tensor]) -> CachedTemplate:
    return replace(
        given,
        entries=tuple(
            replace(entry, blocks=tuple(kept.each(change) for kept in entry.blocks))
            for entry in given.entries
        ),
    )


def _each_of_correction(given: Correction, change: Callable[[Tensor], Tensor]) -> Correction:
    return Correction({place: delta.each(change) for place, delta in given.deltas.items()})
