"""The leader of a pool: decides at every arrival and end of a step, and orders steps."""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Self

import structlog

from giornata.packed.low_rank import SequenceLoras
from giornata.planning.cost_model import HALVED
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices, PoolRow, PoolRule, SharedStepTime, StepStart
from giornata.scheduling.pool_rows import StepSize
from giornata.wire.errors import Failed
from giornata.wire.workers import RankState, StepSample
from giornata_denoiser.engine.batch_tensors import LowRanks, NoLoras, ready_row
from giornata_denoiser.engine.engine import EngineState
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.pool.completion import GroupEpochs, StepCompletionHandler
from giornata_denoiser.pool.messages import ReleaseRows, StepOrder, WarmGroup
from giornata_denoiser.pool.ranks import RankSupervisor
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.shared_rows import SharedRowStore, parcel
from giornata_denoiser.pool.state import InFlightPoolStep, LeaderRow, PoolState, RowStepStart, TimesOf
from giornata_denoiser.rows.row import Row

# What a leader orders: steps that a rule has chosen, now and just before the steps that run are predicted
# to end.


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
        low_ranks: LowRanks,
    ) -> None:
        self._ranks, self._book, self._shelf, self._epochs = ranks, book, shelf, epochs
        self._rule, self._together, self._halves, self._low_ranks = rule, together, halves, low_ranks
        self.paused = 0
        """How many rows have waited for LoRAs while others could go on."""
        self._late: frozenset[RowKey] = frozenset()
        """Rows that wait for their LoRAs, as of the last look."""
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
        """Return when :meth:`decide` is to be called if nothing happens."""
        aheads = (self._ahead_s(flight, now_s) for flight in self._book.flights.values() if _may_ask(flight))
        return min(self._wake_s, min(aheads, default=math.inf))

    def decide(self, now_s: float) -> None:
        """Order what is to begin, where something has happened; then what follows steps that are about to end."""
        if self.news or now_s >= self._wake_s:
            self.news, self._wake_s = False, math.inf
            self._pause()
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

    def _pause(self) -> None:
        """Let rows wait whose LoRAs are missing, and LoRAs that have arrived act from the next step on.

        LoRAs join a row at its boundary: one in flight is not ordered ahead where they have arrived.
        """
        late: set[RowKey] = set()
        for key, held in self._book.rows.items():
            row = replace(held.row, step=held.row.step + len(held.flights)) if held.flights else held.row
            now = ready_row(row, self._low_ranks)
            if now is None:
                late.add(key)
            elif not held.flights:
                held.row = now
            held.waits = now is None or (now is not row and bool(held.flights))
        self.paused += len(late - self._late)  # others are looked at again, and wait still
        self._late = frozenset(late)

    def _decide_ahead(self, ending: Collection[InFlightPoolStep], now_s: float) -> None:
        """Decide as if `ending` had ended, and order what their ranks can begin without another word.

        A row in flight stays on its devices: elsewhere its state is not there before the step ends.
        """
        for flight in ending:
            flight.next_asked = True
        self._pause()
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
        """Return whether rows in flight are where the step is to be, and computed in the same way."""
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
            (
                held.shared,
                self._shelf.ordered(
                    held.row, held.shared, step, self._acting(held.row, step), fresh=fresh, plain=held.plain
                ),
            )
            for held, step, fresh, _ in entered
        ]
        ordered = tuple(each for _, each in named)
        order = StepOrder(flight.number, begin.devices, epoch, ordered, halves)
        for device in begin.devices:
            member = self._ranks.members[device]
            self._ranks.send(member, [*self._shelf.parcels(member.told, named), parcel(order)])
        self._leave(entered)

    def _acting(self, row: Row, step: int) -> SequenceLoras | None:
        """The LoRAs that act in a step of `row`; a rank fails the step where they are missing."""
        loras = row.adapters.acting(step)
        return self._low_ranks.find(loras) if loras else None

    def _leave(self, entered: Iterable[RowStepStart]) -> None:
        """Have ranks let go of what they keep of rows that go on elsewhere."""
        for held, _, _, left in entered:
            for member in (self._ranks.members[device] for device in left):
                if member.ready and held.shared.number in member.told.rows:
                    self._ranks.send(member, [parcel(ReleaseRows((held.shared.number,)))])

    def _seconds(self, begin: StepStart, rows: Mapping[object, PoolRow]) -> float:
        """Return how long a step is predicted to take."""
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


# The leader: decides at every arrival and end of a step, orders steps, and has their rows go on when a rank
# is lost.
#
# One thread does so. It waits for its ranks, for callers and for the next moment that it has planned, and
# never polls.


WAKE: Final = b"\0"

log = structlog.get_logger(__name__)


class DevicePool:
    """Several devices as one engine; satisfies :class:`giornata_denoiser.engine.engine.RowEngine` from entering on.

    Args:
        ranks: have loaded the model; they end with the context.
        arena: where templates and corrections lie that were put there already.
        rule: chooses the steps that begin.
        groups: that a step may have, smaller ones first; their members make them now.
        times: predicts steps; asked in the pool's thread. `together` predicts those that several rows share,
            `halves` tells which of two ways is the quicker one.
        observe: told of every sample, with the devices that computed it, in that thread.
        on_report: told of every step, likewise.
        on_crash: told that no rank is left and none can load; rows can still be taken.
        low_ranks: holds the LoRAs of rows in host memory.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        arena: Arena,
        *,
        rule: PoolRule,
        groups: Sequence[Devices],
        times: TimesOf,
        together: SharedStepTime | None,
        halves: HalvesOf,
        observe: Callable[[StepSample], object],
        on_report: Callable[[StepReport], object],
        on_crash: Callable[[Exception], object],
        low_ranks: LowRanks | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._on_report, self._on_crash, self._observe = on_report, on_crash, observe
        self._book = PoolState(times)
        shelf = SharedRowStore(arena)
        self._settling = StepCompletionHandler(ranks, self._book, arena, clock)
        self._deciding = StepDispatcher(
            ranks, self._book, shelf, self._settling.epochs, rule, together, halves, low_ranks or NoLoras()
        )
        self._groups = groups
        self._lock = threading.Lock()
        self._arriving: dict[RowKey, Row] = {}
        """Rows that the thread has not seen."""
        self._gone: list[int] = []
        """Numbers of rows that have left and ranks still have."""
        self._accepting, self._stopping = True, False
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name="pool")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Let running steps end, then end all ranks; rows that are left can still be taken. Blocks so long."""
        with self._lock:
            self._accepting, self._stopping = False, True
        self._wake()
        self._thread.join()
        os.close(self._woken)
        os.close(self._waker)

    def submit(self, rows: Sequence[Row]) -> bool:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.submit`."""
        with self._lock:
            if not self._accepting:
                return False
            for row in rows:
                if row.key in self._arriving or row.key in self._book.rows:
                    raise ValueError(f"row {row.key} is in the batch already")
            self._arriving |= {row.key: row for row in rows}
        self._wake()
        return True

    @property
    def paused(self) -> int:
        """How many rows have waited for LoRAs while others could go on."""
        return self._deciding.paused

    def resume(self, job_id: str, attempt: int) -> None:  # noqa: ARG002 - protocol
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.resume`: all rows that wait are looked at."""
        self._wake()

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.cancel`."""
        with self._lock:
            return self._taken(
                [
                    key
                    for key in (*self._book.rows, *self._arriving)
                    if key.job_id == job_id and attempt in (None, key.attempt)
                ]
            )

    def take_all(self) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.take_all`."""
        with self._lock:
            self._accepting = False
            begun = [held.row.key for held in self._book.rows.values() if held.devices]
            others = [key for key in (*self._book.rows, *self._arriving) if key not in begun]
            return tuple(row for row in self._taken([*begun, *others]) if not row.background)

    def state(self) -> EngineState:
        """The rows as of their last steps."""
        with self._lock:
            edits = [held for held in self._book.rows.values() if not held.row.background]
            began = [each.began_s for each in self._book.flights.values() if each.began_s is not None]
            arriving = (row for row in self._arriving.values() if not row.background)
            return EngineState(
                tuple(held.row for held in edits if held.devices),
                (*(held.row for held in edits if not held.devices), *arriving),
                min(began, default=None),
            )

    def ranks(self) -> tuple[RankState, ...]:
        """The devices, as telemetry tells of them."""
        with self._lock:
            busy = self._book.busy()
            return tuple(member.state(busy) for member in self._ranks.members)

    def _taken(self, keys: Sequence[RowKey]) -> tuple[Row, ...]:
        """Rows that leave, as of their last steps; the caller holds the lock."""
        rows: list[Row] = []
        for key in keys:
            if key in self._arriving:
                rows.append(self._arriving.pop(key))
                continue
            (held,) = self._book.remove([key])
            self._gone.append(held.shared.number)
            rows.append(held.row)
        self._wake()
        return tuple(rows)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is to wake already
            os.write(self._waker, WAKE)

    def _run(self) -> None:
        self._ranks.selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            self._deciding.warm(self._groups)
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the thread's edge: its owner is told
            with self._lock:
                self._accepting = False
            self._on_crash(error)
        finally:
            self._ranks.close()

    def _turn(self) -> bool:
        """Wait for news and take them in; False when the pool is to end."""
        now = self._clock()
        wait_s = min(self._settling.next_s(), self._deciding.next_s(now)) - now
        ready = self._ranks.selector.select(None if math.isinf(wait_s) else max(0.0, wait_s))
        with self._lock:
            now = self._clock()
            for key, _ in ready:
                if key.data is None:
                    os.read(self._woken, 1 << 16)
                    self._deciding.news = True
                else:
                    self._deciding.news |= self._settling.hear(key.data, now)
            self._deciding.news |= self._settling.watch(now)
            if self._settling.joined:
                joined, self._settling.joined = set(self._settling.joined), []
                self._deciding.warm(group for group in self._groups if not joined.isdisjoint(group))
            self._forget()
            if not self._stopping:
                self._arrive(now)
                self._deciding.decide(self._clock())
            reports, self._settling.reports = self._settling.reports, []
            goes_on = not self._stopping or bool(self._book.flights)
        for report in reports:
            if report.sample is not None and not report.sample.loaded_bytes:
                self._observe(report.sample)
            self._on_report(report)
        if all(member.given_up for member in self._ranks.members):
            raise Failed("All ranks of the pool have ended, and none can load the model again.")
        return goes_on

    def _arrive(self, now_s: float) -> None:
        """Put rows that have come into shared memory."""
        for key, row in self._arriving.items():
            try:
                self._deciding.put(row, now_s)
            except OSError as error:
                self._settling.blame(row, error, now_s)
                log.warning("row_not_shared", key=key, error=str(error))
        self._arriving.clear()

    def _forget(self) -> None:
        """Have ranks forget rows that have left, once no order names them."""
        self._gone += self._settling.gone
        self._settling.gone.clear()
        self._deciding.forget(self._gone)
        self._gone.clear()
