"""The rows and steps of a pool as its leader knows them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Final, NamedTuple

from giornata.planning.cost_model import CostModel
from giornata.planning.operations import NetworkOperations, StepWork
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices, PoolRow, StepStart, Times
from giornata.scheduling.demand import RowShape, StepTimeModel
from giornata.scheduling.pool_rows import DegreeTimes, StepSize
from giornata.wire.values import BlockMode
from giornata.wire.workers import StepSample
from giornata_denoiser.pool.shared_rows import SharedRow
from giornata_denoiser.rows.row import Row

# The rows and steps of a pool, as its leader knows them: what a rule is shown, and what ends and losses do
# to them.
#
# A plain object: it sends nothing and reads no clock.


LOSSES: Final = 3
"""A row with so many lost steps behind it, the last one alone on its device, is what ends its ranks."""


class RowStepTimes(NamedTuple):
    """The times that a row's steps take."""

    step_s: Times
    """By degree, on the devices of the one before."""
    moved_s: Times
    """On others."""
    size: Hashable
    """See :attr:`giornata.scheduling.degrees.pool.PoolRow.size`."""


TimesOf = Callable[[Row], RowStepTimes]


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
    """Whether its next step waits for its LoRAs."""
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

    def remove(self, keys: Iterable[RowKey]) -> list[LeaderRow]:
        """Rows have left; steps of theirs that run go on for the others, or for nothing."""
        return [self.rows.pop(key) for key in keys]

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
                held.row = replace(held.row, begun=False)
            if (
                len(begin.devices) > 1 and held.row.records is not None
            ):  # each of them would leave its share alone
                held.row = replace(held.row, records=None, entries=())
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
            row.due_s,
            left,
            step_s,
            moved_s,
            held.devices,
            until_s,
            row.priority,
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


# What steps of a pool's rows take, as its leader predicts them from what steps have taken.


class PoolTimes:
    """Times by degree; one thread asks and observes.

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

    def of(self, row: Row) -> RowStepTimes:
        """See :data:`giornata_denoiser.pool.state.TimesOf`."""
        size = step_size(row)
        return RowStepTimes(*self._times().of(size), size)

    def together(self, rows: Sequence[PoolRow], degree: int) -> float | None:
        """See :class:`giornata.scheduling.degrees.pool.SharedStepTime`."""
        return self._times().together(rows, degree)

    def halves(self, sizes: Sequence[Hashable]) -> bool:
        """See :data:`giornata_denoiser.pool.leader.HalvesOf`."""
        return self._times().halves([size for size in sizes if isinstance(size, StepSize)])

    def observe(self, sample: StepSample) -> None:
        """Take in a step that waited for no load."""
        work = StepWork(
            *(float(sample.calls), float(sample.sequences), sample.linear, sample.attention),
            *(sample.convolution, sample.gathered, sample.low_rank, float(sample.segments), sample.control),
        )
        self._model.observe_step(work, sample.step_ms, degree=sample.degree, halves=sample.halves)

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
    shape = row.shapes[0]
    return StepSize.of(
        RowShape(
            row.prompts[0].joint_tokens,
            row.block_tokens,
            row.computed_tokens if row.template is not None or row.renews else row.block_tokens,
            steps=1,
            sequences=len(row.prompts),
            companions=row.companions,
            prefix=max(row.prefix, default=0),
            low_rank=shape.low_rank,
            segments=1 / len(row.prompts) if shape.low_rank else 0.0,
            control=shape.control,
        ),
        reuses=row.template is not None,
        renewed_every=row.renewed_every,
        corrected=row.corrections is not None,
    )
