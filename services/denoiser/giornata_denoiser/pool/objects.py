"""Rows, templates and corrections as ranks get them: structure by a message, tensors by their place in shared memory.

Only a leader writes such messages, and only its own ranks read them.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from giornata_denoiser.pool.memory import (
    ALIGNMENT,
    Arena,
    MappedSlabs,
    TensorLocation,
    copied,
    layout,
    starts,
    viewed,
)
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedTemplate

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
    """Where one state of a row is in its slab."""

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
    """What `row` refers to of :data:`KEPT`."""
    return (*(() if row.template is None else (row.template,)), *(row.corrections or ()))
