"""What a leader orders: steps that a rule has chosen, now and just before the steps that run are predicted to end."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Final

from giornata.planning.degrees import HALVED
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degree_times import StepSize
from giornata.scheduling.degrees.pool import Devices, PoolRow, PoolRule, SharedStepTime, StepStart
from giornata_denoiser.pool.book import InFlightPoolStep, LeaderRow, PoolState, RowStepStart
from giornata_denoiser.pool.messages import ReleaseRows, StepOrder, WarmGroup
from giornata_denoiser.pool.ranks import RankSupervisor
from giornata_denoiser.pool.settling import GroupEpochs
from giornata_denoiser.pool.shelf import SharedRowStore, parcel
from giornata_denoiser.rows.row import Row

AHEAD: Final = (0.1, 0.002)
"""A step's order is sent when the one before is predicted to end within this share of its time, and so many seconds."""

HalvesOf = Callable[[Sequence[Hashable]], bool]
"""Whether two devices are quicker on steps of rows of these sizes where one computes the unconditional sequences."""


class StepDispatcher:
    """Asks the rule, and orders what it chooses."""

    def __init__(  # noqa: PLR0917 - its own parts
        self,
        ranks: RankSupervisor,
        book: PoolState,
        shelf: SharedRowStore,
        epochs: GroupEpochs,
        rule: PoolRule,
        together: SharedStepTime | None,
        halves: HalvesOf,
    ) -> None:
        self._ranks, self._book, self._shelf, self._epochs = ranks, book, shelf, epochs
        self._rule, self._together, self._halves = rule, together, halves
        self._wake_s = math.inf
        self.news = True
        """Whether something has happened since the last decision."""

    def put(self, row: Row, now_s: float) -> None:
        """A row has arrived. OSError where there is no memory for it."""
        shared, held = self._shelf.put(row)
        self._book.add(held, shared, now_s)

    def forget(self, rows: Sequence[int]) -> None:
        """Have ranks forget rows that have left, and what nothing refers to any more."""
        members = [member for member in self._ranks.members if member.ready]
        forgotten = self._shelf.forgotten([member.told for member in members], rows)
        for member, each in zip(members, forgotten, strict=True):
            if each is not None:
                self._ranks.send(member, [each])

    def warm(self, groups: Iterable[Devices]) -> None:
        """Have the members of `groups` make them before a step needs one."""
        for devices in groups:
            if len(devices) > 1 and all(self._ranks.members[device].ready for device in devices):
                order = parcel(WarmGroup(devices, self._epochs.of(devices)))
                for device in devices:
                    self._ranks.send(self._ranks.members[device], [order])

    def next_s(self, now_s: float) -> float:
        """When :meth:`decide` is to be called if nothing happens."""
        aheads = (self._ahead_s(flight, now_s) for flight in self._book.flights.values() if _may_ask(flight))
        return min(self._wake_s, min(aheads, default=math.inf))

    def decide(self, now_s: float) -> None:
        """Order what is to begin, where something has happened; then what follows steps that are about to end."""
        if self.news or now_s >= self._wake_s:
            self.news, self._wake_s = False, math.inf
            rows = self._book.shown(now_s)
            free = self._ready() - self._book.busy()
            if free and any(row.boundary for row in rows):
                decision = self._rule.decide(now_s, rows, free)
                self._wake_s = math.inf if decision.wake_s is None else decision.wake_s
                for begin in decision.begins:
                    self._order(begin, rows, now_s)
        ending = [
            flight
            for flight in self._book.flights.values()
            if _may_ask(flight) and now_s >= self._ahead_s(flight, now_s)
        ]
        if ending:
            self._decide_ahead(ending, now_s)

    def _decide_ahead(self, ending: Collection[InFlightPoolStep], now_s: float) -> None:
        """Decide as if `ending` had ended, and order what their ranks can begin without another word.

        A row in flight stays on its devices: elsewhere its state is not there before the step ends.
        """
        for flight in ending:
            flight.next_asked = True
        held = {device for flight in ending for device in flight.devices}
        numbers = frozenset(flight.number for flight in ending)
        moment_s = max(now_s, *(flight.until_s(now_s) for flight in ending))
        rows = self._book.shown(moment_s, ended=numbers)
        others = {d for f in self._book.flights.values() if f.number not in numbers for d in f.unanswered}
        free = self._ready() - others
        if not any(row.boundary for row in rows):
            return
        for begin in self._rule.decide(moment_s, rows, free).begins:
            if held.isdisjoint(begin.devices):
                continue
            if self._stay(begin, halves=self._halved(begin, {row.key: row for row in rows})):
                self._order(begin, rows, now_s)

    def _stay(self, begin: StepStart, *, halves: bool) -> bool:
        """Whether rows in flight are where the step is to be, and computed in the same way."""
        flights = [flight for held in self._held(begin) for flight in held.flights]
        return all((flight.devices, flight.halves) == (begin.devices, halves) for flight in flights)

    def _held(self, begin: StepStart) -> list[LeaderRow]:
        return [self._book.rows[key] for key in begin.rows if isinstance(key, RowKey)]

    def _halved(self, begin: StepStart, rows: Mapping[object, PoolRow]) -> bool:
        """In which of two ways two devices compute a step: as rows that have kept something there were, else quicker.

        A row that keeps something from step to step would compute a step in full where its way changes.
        """
        if len(begin.devices) != HALVED:
            return False
        epoch, sizes = self._epochs.of(begin.devices), [rows[key].size for key in begin.rows]
        ways = {
            held.halves
            for held, size in zip(self._held(begin), sizes, strict=True)
            if held.stays(begin.devices, epoch, halves=held.halves)
            and isinstance(size, StepSize)
            and size.pays
        }
        return ways.pop() if len(ways) == 1 else self._halves(sizes)

    def _order(self, begin: StepStart, rows: Sequence[PoolRow], now_s: float) -> None:
        """Tell the ranks of a step, and all that they need for it."""
        epoch, shown = self._epochs.of(begin.devices), {row.key: row for row in rows}
        halves, seconds = self._halved(begin, shown), self._seconds(begin, shown)
        flight, entered = self._book.begin(begin, now_s, epoch=epoch, halves=halves, seconds=seconds)
        named = [
            (held.shared, self._shelf.ordered(held.row, held.shared, step, fresh=fresh, plain=held.plain))
            for held, step, fresh, _ in entered
        ]
        ordered = tuple(each for _, each in named)
        order = StepOrder(flight.number, begin.devices, epoch, ordered, halves)
        for device in begin.devices:
            member = self._ranks.members[device]
            self._ranks.send(member, [*self._shelf.parcels(member.told, named), parcel(order)])
        self._leave(entered)

    def _leave(self, entered: Iterable[RowStepStart]) -> None:
        """Have ranks let go of what they keep of rows that go on elsewhere."""
        for held, _, _, left in entered:
            for member in (self._ranks.members[device] for device in left):
                if member.ready and held.shared.number in member.told.rows:
                    self._ranks.send(member, [parcel(ReleaseRows((held.shared.number,)))])

    def _seconds(self, begin: StepStart, rows: Mapping[object, PoolRow]) -> float:
        """How long a step is predicted to take."""
        members, degree = [rows[key] for key in begin.rows], len(begin.devices)
        if len(members) > 1 and self._together is not None:
            together = self._together(members, degree)
            if together is not None:
                return together
        stays = all(row.devices == begin.devices for row in members)
        return sum((row.step_s if stays else row.moved_s).get(degree, math.inf) for row in members)

    def _ready(self) -> frozenset[int]:
        return frozenset(member.me for member in self._ranks.members if member.ready)

    @staticmethod
    def _ahead_s(flight: InFlightPoolStep, now_s: float) -> float:
        return flight.until_s(now_s) - AHEAD[0] * flight.seconds - AHEAD[1]


def _may_ask(flight: InFlightPoolStep) -> bool:
    return flight.began_s is not None and not flight.next_asked and not flight.settled
