"""The rows and steps of a pool as its leader has them: in shared memory, and as ranks and the rule know them.

Plain objects: they send nothing and read no clock.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final, NamedTuple

from torch import Tensor

from giornata.frames import framed
from giornata.packed.low_rank import SequenceLoras
from giornata.planning.cost_model import CostModel
from giornata.planning.operations import NetworkOperations
from giornata.scheduling.batch import RowKey
from giornata.scheduling.cost_models import work_of
from giornata.scheduling.degrees.pool import Devices, PoolRow, StepStart
from giornata.scheduling.demand import StepTimeModel
from giornata.scheduling.pool_rows import DegreeTimes, RowTimes, StepSize
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.controls.residuals import ControlLinkAddress, ControlNetSession
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
from giornata_denoiser.templates.store import HostMemory


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
    kept: Mapping[int, object]
    """What it refers to of :data:`giornata_denoiser.pool.messages.KEPT`, by number."""
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
        self._kept: dict[int, int] = {}
        """Numbers of kept objects, by identity."""
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
        packed, slab = self._packed(bare(held)), self._arena.number_of(memory)
        return SharedRow(next(self._numbers), packed, ring, memory, slab), held

    def ordered(
        self,
        row: Row,
        shared: SharedRow,
        step: int,
        low_rank: SequenceLoras | None = None,
        session: ControlNetSession[ControlLinkAddress] | None = None,
        *,
        fresh: bool,
        plain: bool,
    ) -> OrderedRow:
        """`row` as an order of the step after so many, in which the LoRAs of `low_rank` act, names it.

        For its ControlNets it is open in a `session`.
        """
        known = tuple(self._keep(each) for each in row.reuse.corrections or ()) if fresh else ()
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
            session,
        )

    def parcels(
        self, told: RankKnowledge, rows: Sequence[tuple[SharedRow, OrderedRow]]
    ) -> Iterator[RankMessage]:
        """Return what a rank has to be told before a step of `rows`."""
        for shared, ordered in rows:
            packed = shared.packed
            for number in (*packed.kept, *(ordered.corrections or ()), ordered.low_rank):
                if number is not None and number not in told.kept:
                    thing = self._by_number[number]
                    yield from self._slabs(told, thing.slabs)
                    told.kept.add(number)
                    yield parcel(PutSharedObject(number, thing.data, thing.own))
            if shared.number not in told.rows:
                yield from self._slabs(told, packed.slabs | {shared.slab})
                told.rows.add(shared.number)
                yield parcel(PutRow(shared.number, packed.data, packed.own, shared.slab, shared.ring))

    def forgotten(self, told: Sequence[RankKnowledge], rows: Sequence[int]) -> Iterator[RankMessage | None]:
        """By rank: what it is to forget, `rows` and all that has gone meanwhile; None where it knows nothing of it."""
        self._collect()
        kept, self._untold = self._untold, []
        slabs = self._arena.gone()
        for each in told:
            gone = ((each.rows, rows), (each.kept, kept), (each.slabs, slabs))
            mine = ForgetResources(*(tuple(known.intersection(numbers)) for known, numbers in gone))
            for known, numbers in gone:
                known.difference_update(numbers)
            yield parcel(mine) if mine != ForgetResources() else None

    def _collect(self) -> None:
        while self._gone:
            identity, number = self._gone.popleft()
            if self._kept.get(identity) == number:
                del self._kept[identity]
            self._by_number.pop(number, None)
            self._untold.append(number)

    def _keep(self, thing: object) -> int:
        self._collect()
        if id(thing) not in self._kept:
            packed, number = self._packed(thing), next(self._numbers)
            self._kept[id(thing)], self._by_number[number] = number, packed
            weakref.finalize(thing, self._gone.append, (id(thing), number))
        return self._kept[id(thing)]

    def _packed(self, thing: object) -> PackedObject:
        """`thing`, its tensors in shared memory, and numbers in place of what it refers to of other kept objects."""
        places, kept = TensorPlaces(self._arena), dict[int, object]()

        def number(part: object) -> int | None:
            if part is thing:
                return None
            known = self._keep(part)
            kept[known] = part
            return known

        data = pack(thing, places, number)
        own, memory = _own_slab(self._arena, places)
        return PackedObject(data, places.slabs | ({own} - {0}), kept, own, memory)

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


# What a rule is shown of rows, and what ends and losses of steps do to them.


LOSSES: Final = 3
"""A row with so many lost steps behind it, the last one alone on its device, is what ends its ranks."""


TimesOf = Callable[[Row], RowTimes]


@dataclass(eq=False)
class InFlightPoolStep:
    """A step that ranks have been ordered to compute."""

    number: int
    keys: tuple[RowKey, ...]
    devices: Devices
    epoch: int
    halves: bool
    """Whether one of two devices computes the unconditional sequences."""
    seconds: float
    """As predicted."""
    began_s: float | None
    """None while it is behind another one on some device."""
    unanswered: set[int]
    """Devices whose ranks have not told of its end."""
    settled: bool = False
    """Whether it is known what it did to its rows."""
    asked: int = 0
    """How often its ranks have been asked whether they run."""
    next_asked: bool = False
    """Whether what follows it has been decided ahead."""

    def until_s(self, now_s: float) -> float:
        """Return when it is predicted to end; one that is behind another begins now at the earliest."""
        return (now_s if self.began_s is None else self.began_s) + self.seconds


@dataclass(eq=False)
class LeaderRow:
    """A row of the pool."""

    row: Row
    """As of its last step."""
    shared: SharedRow
    arrived_s: float
    place: int
    devices: Devices = ()
    """Devices of its last step or of the one in flight; empty before the first one here."""
    epoch: int = 0
    """Epoch of the group of its devices."""
    halves: bool = False
    """How they compute its steps."""
    flights: list[InFlightPoolStep] = field(default_factory=list)
    """Its steps in flight, the one that runs first."""
    alone: bool = False
    """Whether a step with others, or of several devices, has failed: it is to be computed by itself."""
    losses: int = 0
    """Steps that were lost with a rank."""
    plain: bool = False
    """Whether it has to do without its template."""
    waits: bool = False
    """Whether its next step waits for its LoRAs or ControlNets."""
    session: ControlNetSession[ControlLinkAddress] | None = None
    """Where it was open for its ControlNets when its latest step was ordered."""
    fresh: bool = True
    """Whether its next step begins from what is in its slab alone."""

    def stays(self, devices: Devices, epoch: int, *, halves: bool) -> bool:
        """Return whether these devices, computing in this way, have all that its latest step has left."""
        return not self.fresh and (self.devices, self.epoch, self.halves) == (devices, epoch, halves)


class RowStepStart(NamedTuple):
    """The state with which a row enters a step."""

    held: LeaderRow
    step: int
    """Its steps before."""
    fresh: bool
    """Whether it begins from the state in its slab."""
    left: frozenset[int]
    """Devices of its last step that have no part in this one."""


class PoolState:
    """The rows and steps of a pool.

    Args:
        times: predicts the steps of a row.
    """

    def __init__(self, times: TimesOf) -> None:
        self._times = times
        self.rows: dict[RowKey, LeaderRow] = {}
        self.flights: dict[int, InFlightPoolStep] = {}
        """By number, those that some rank has not answered."""
        self._numbers, self._places = count(1), count(1)

    def add(self, row: Row, shared: SharedRow, now_s: float) -> None:
        """A row has arrived."""
        self.rows[row.key] = LeaderRow(row, shared, now_s, next(self._places))

    def busy(self) -> frozenset[int]:
        """Devices that a step holds."""
        return frozenset(device for flight in self.flights.values() for device in flight.unanswered)

    def shown(self, now_s: float, ended: AbstractSet[int] = frozenset()) -> list[PoolRow]:
        """The rows as a rule sees them, if the flights `ended` had ended."""
        return [each for held in self.rows.values() if (each := self._shown(held, now_s, ended)) is not None]

    def begin(
        self, begin: StepStart, now_s: float, *, epoch: int, halves: bool, seconds: float
    ) -> tuple[InFlightPoolStep, list[RowStepStart]]:
        """A step is ordered; returns it and how its rows enter it."""
        busy = self.busy()
        keys = tuple(key for key in begin.rows if isinstance(key, RowKey))
        flight = InFlightPoolStep(
            next(self._numbers),
            keys,
            begin.devices,
            epoch,
            halves,
            seconds,
            None if busy.intersection(begin.devices) else now_s,
            set(begin.devices),
        )
        rows: list[RowStepStart] = []
        for key in keys:
            held = self.rows[key]
            fresh = not held.stays(begin.devices, epoch, halves=halves)
            if fresh:
                held.row = replace(held.row, degree=0)
            if (
                len(begin.devices) > 1 and held.row.records is not None
            ):  # each of them would leave its share alone
                held.row = replace(held.row, records=None)
            left = frozenset(held.devices).difference(begin.devices)
            held.devices, held.epoch, held.halves, held.fresh = begin.devices, epoch, halves, False
            rows.append(RowStepStart(held, held.row.step + len(held.flights), fresh, left))
            held.flights.append(flight)
        self.flights[flight.number] = flight
        return flight, rows

    def answered(self, flight: InFlightPoolStep, device: int, now_s: float) -> None:
        """A rank has told of a step's end, or is lost: what is behind it on all its devices begins."""
        flight.unanswered.discard(device)
        if not flight.unanswered:
            self.flights.pop(flight.number, None)
        for other in self.flights.values():
            if other.began_s is None and self._first(other):
                other.began_s = now_s

    def settle(self, flight: InFlightPoolStep) -> Iterator[LeaderRow]:
        """It is known what a step did: the rows of it that are here, which it holds no more."""
        flight.settled = True
        for key in flight.keys:
            held = self.rows.get(key)
            if held is not None and flight in held.flights:
                held.flights.remove(flight)
                yield held

    def undo(self, flight: InFlightPoolStep) -> list[LeaderRow]:
        """A step came to nothing; what was ordered behind it for the same rows will be refused, and is void, too."""
        found = list(self.settle(flight))
        for held in found:
            held.fresh = True
            held.flights.clear()
        return found

    def behind(self, device: int) -> list[InFlightPoolStep]:
        """The steps of a device that it has not answered, in order."""
        return [flight for flight in self.flights.values() if device in flight.unanswered]

    def _first(self, flight: InFlightPoolStep) -> bool:
        return all(self.behind(device)[0] is flight for device in flight.unanswered)

    def _shown(self, held: LeaderRow, now_s: float, ended: AbstractSet[int]) -> PoolRow | None:
        row = held.row
        flights = [flight for flight in held.flights if flight.number not in ended]
        left = row.steps - row.step - len(held.flights)
        if held.waits or (not flights and not left):
            return None
        step_s, moved_s, size = self._times(row)
        if held.alone:
            step_s, moved_s = ({1: times[1]} for times in (step_s, moved_s))
        until_s = max(now_s, flights[-1].until_s(now_s)) if flights else None
        return PoolRow(
            row.key,
            held.arrived_s,
            row.wishes.due_s,
            left,
            step_s,
            moved_s,
            held.devices,
            until_s,
            row.wishes.priority,
            place=float(held.place),
            background=row.background,
            size=size,
        )


def failed(held: LeaderRow) -> bool:
    """A step with the row has been lost with its rank: whether it is the row that ends ranks. Counts the loss."""
    was_alone = held.alone
    held.losses += 1
    held.alone = True
    return was_alone and held.losses >= LOSSES


class GroupEpochs:
    """Numbers of groups: another one after a member, or the group itself, was lost."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._of: dict[Devices, int] = {}

    def of(self, devices: Devices) -> int:
        """The group's present one."""
        if devices not in self._of:
            self._of[devices] = next(self._numbers)
        return self._of[devices]

    def renew(self, devices: Iterable[int]) -> None:
        """All groups with one of `devices` are to be made again."""
        gone = set(devices)
        self._of = {group: epoch for group, epoch in self._of.items() if gone.isdisjoint(group)}

    def renew_group(self, devices: Devices) -> None:
        """This group alone is."""
        self._of.pop(devices, None)


class PoolTimes:
    """Step times of a pool's rows by degree, predicted from what steps have taken; one thread uses it.

    Args:
        model: follows what steps cost, by degree.
        operations: of the network.
        reused: how rows take from templates.
        rows: most rows of a step; `tokens` likewise.
    """

    def __init__(
        self, model: CostModel, operations: NetworkOperations, reused: BlockMode, rows: int, tokens: int
    ) -> None:
        self._model, self._operations, self._reused = model, operations, reused
        self._most = rows, float(tokens)
        self._known: tuple[object, DegreeTimes] | None = None

    def of(self, row: Row) -> RowTimes:
        """The times of a row's steps."""
        return self._times().of(step_size(row))

    def together(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        """See :class:`giornata.scheduling.degrees.pool.SharedStepTime`."""
        return self._times().together(rows, degree)

    def halves(self, sizes: Sequence[Hashable]) -> bool:
        """Whether two devices are quicker on rows of these sizes where one computes the unconditional sequences."""
        return self._times().halves([size for size in sizes if isinstance(size, StepSize)])

    def observe(self, sample: StepSample) -> None:
        """Take in a step that waited for no load."""
        self._model.observe_step(work_of(sample), sample.step_ms, degree=sample.degree, halves=sample.halves)

    def _times(self) -> DegreeTimes:
        state = self._model.state
        if self._known is None or self._known[0] is not state:
            pace = StepTimeModel(
                self._model.costs, self._operations, reused=self._reused, ways=self._model.ways
            )
            self._known = state, DegreeTimes(pace, *self._most)
        return self._known[1]


def step_size(row: Row) -> StepSize:
    """Return what the steps of `row` compute, as far as their time depends on it."""
    return StepSize.of(
        replace(row.estimate, padding=0, skipped=0),
        reuses=row.reuse.template is not None,
        renewed_every=row.reuse.renewed_every,
        corrected=row.reuse.corrections is not None,
    )
