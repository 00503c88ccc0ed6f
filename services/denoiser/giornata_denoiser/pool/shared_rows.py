"""The rows that a leader has put into shared memory, and what each of its ranks knows of them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from giornata.frames import framed
from giornata.packed.low_rank import SequenceLoras
from giornata_denoiser.pool.messages import (
    ForgetResources,
    MapSlab,
    Order,
    OrderedRow,
    PutRow,
    PutSharedObject,
    RankSetup,
    pack,
    unpack,
)
from giornata_denoiser.pool.shared_memory import Arena, ExpansionHead, StateRing, TensorPlaces, bare
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.identity import HostMemory


@dataclass(eq=False)
class RankKnowledge:
    """The resources that one rank process knows, by number."""

    slabs: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)
    rows: set[int] = field(default_factory=set)


class RankMessage(NamedTuple):
    """A message to a rank, and the file that goes with it."""

    frame: bytes
    files: tuple[int, ...] = ()


class PackedObject(NamedTuple):
    """An object without its tensors."""

    data: bytes
    slabs: frozenset[int]
    """Where they are."""
    kept: tuple[object, ...]
    """What it refers to of :data:`KEPT`."""
    own: int
    """The slab that was made for it; 0 where all was in shared memory."""
    memory: Tensor | None
    """Holds that slab."""


@dataclass(frozen=True, eq=False)
class SharedRow:
    """A row in shared memory."""

    number: int
    packed: PackedObject
    ring: StateRing
    memory: Tensor
    """(bytes,) uint8: its states."""
    slab: int


class SharedRowStore:
    """Numbers rows and what they share, and says what a rank has to be told before an order. One thread uses it.

    Args:
        arena: where tensors are put, unless they lie there already.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._numbers = count(1)
        self._kept: dict[int, tuple[int, PackedObject]] = {}
        """Number and content of kept objects, by identity."""
        self._by_number: dict[int, PackedObject] = {}
        self._gone: deque[tuple[int, int]] = deque()
        """Identity and number of kept objects that nothing refers to any more."""
        self._untold: list[int] = []

    def put(self, row: Row) -> tuple[SharedRow, Row]:
        """Put `row` into shared memory; returns it as the leader holds it, its state being in the slab.

        Raises:
            OSError: there is not so much memory.
        """
        ring = StateRing.of(row)
        memory = self._arena.allocated(ring.size_bytes)
        ring.write(memory, row)
        held = ring.read(memory, row, row.step)
        kept: tuple[object, ...] = () if held.template is None else (held.template,)
        packed = self._packed(bare(held), {id(each): self._keep(each) for each in kept}, kept)
        slab = self._arena.number_of(memory)
        return SharedRow(next(self._numbers), packed, ring, memory, slab), held

    def ordered(
        self,
        row: Row,
        shared: SharedRow,
        step: int,
        low_rank: SequenceLoras | None = None,
        *,
        fresh: bool,
        plain: bool,
    ) -> OrderedRow:
        """`row` as an order of the step after so many, in which the LoRAs of `low_rank` act, names it."""
        known = tuple(self._keep(each) for each in row.corrections or ()) if fresh else ()
        return OrderedRow(
            shared.number,
            step,
            fresh,
            known or None,
            plain,
            row.records is not None,
            row.adapters.loras_from,
            ExpansionHead.of(row) if fresh else None,
            None if low_rank is None else self._keep(low_rank),
        )

    def parcels(
        self, told: RankKnowledge, rows: Sequence[tuple[SharedRow, OrderedRow]]
    ) -> Iterator[RankMessage]:
        """Return what a rank has to be told before a step of `rows`."""
        for shared, ordered in rows:
            for number in (*(ordered.corrections or ()), ordered.low_rank):
                if number is not None:
                    yield from self._kept_parcels(told, number)
            if shared.number in told.rows:
                continue
            for each in shared.packed.kept:
                yield from self._kept_parcels(told, self._kept[id(each)][0])
            yield from self._slabs(told, shared.packed.slabs | {shared.slab})
            told.rows.add(shared.number)
            yield parcel(
                PutRow(shared.number, shared.packed.data, shared.packed.own, shared.slab, shared.ring)
            )

    def forgotten(self, told: Sequence[RankKnowledge], rows: Sequence[int]) -> Iterator[RankMessage | None]:
        """By rank: what it is to forget, `rows` and all that has gone meanwhile; None where it knows nothing of it."""
        self._collect()
        kept, self._untold = self._untold, []
        slabs = self._arena.gone()
        for each in told:
            mine = ForgetResources(
                tuple(each.rows.intersection(rows)),
                tuple(each.kept.intersection(kept)),
                tuple(each.slabs.intersection(slabs)),
            )
            each.rows.difference_update(mine.rows)
            each.kept.difference_update(mine.kept)
            each.slabs.difference_update(mine.slabs)
            yield parcel(mine) if mine != ForgetResources() else None

    def _collect(self) -> None:
        while self._gone:
            identity, number = self._gone.popleft()
            if self._kept.get(identity, (0,))[0] == number:
                del self._kept[identity]
            self._by_number.pop(number, None)
            self._untold.append(number)

    def _keep(self, thing: object) -> int:
        self._collect()
        found = self._kept.get(id(thing))
        if found is not None:
            return found[0]
        number = next(self._numbers)
        packed = self._packed(thing)
        self._kept[id(thing)] = number, packed
        self._by_number[number] = packed
        weakref.finalize(thing, self._gone.append, (id(thing), number))
        return number

    def _packed(
        self, thing: object, numbers: Mapping[int, int] | None = None, kept: tuple[object, ...] = ()
    ) -> PackedObject:
        """`thing`, its tensors in shared memory; `numbers` are those of what it refers to, by identity."""
        known = numbers or {}
        places = TensorPlaces(self._arena)
        data = pack(thing, places, lambda part: known.get(id(part)))
        own, memory = _own_slab(self._arena, places)
        return PackedObject(data, places.slabs | ({own} - {0}), kept, own, memory)

    def _kept_parcels(self, told: RankKnowledge, number: int) -> Iterator[RankMessage]:
        if number not in told.kept:
            packed = self._by_number[number]
            yield from self._slabs(told, packed.slabs)
            told.kept.add(number)
            yield parcel(PutSharedObject(number, packed.data, packed.own))

    def _slabs(self, told: RankKnowledge, numbers: frozenset[int]) -> Iterator[RankMessage]:
        for number in sorted(numbers - told.slabs):
            slab = self._arena.slab(number)
            told.slabs.add(number)
            yield parcel(MapSlab(number, slab.size_bytes), slab.descriptor)


def parcel(order: Order | RankSetup, *files: int) -> RankMessage:
    """`order` as it travels to a rank."""
    return RankMessage(framed(pack(order)), files)


def _own_slab(arena: Arena, places: TensorPlaces) -> tuple[int, Tensor | None]:
    """The slab of a message's own tensors, and its memory; 0 where it has none. OSError without memory."""
    descriptor = places.written()
    if descriptor is None:
        return 0, None
    memory = arena.adopted(descriptor, places.size_bytes)
    return arena.number_of(memory), memory


def shared_memory(arena: Arena) -> HostMemory:
    """The memory of `arena`: what lies there already, as ranks leave it, stays where it is. OSError without room."""

    def shared(thing: Any) -> Any:
        places = TensorPlaces(arena)
        data = pack(thing, places)
        _, memory = _own_slab(arena, places)
        return thing if memory is None else unpack(data, lambda place: places.tensor(place, memory))

    return HostMemory(shared, shared)
