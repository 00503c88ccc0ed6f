"""The leader of a pool: decides at every arrival and end of a step, orders steps, and hears what became of them.

Rows go on when a rank is lost. One thread does all of it: it waits for ranks, for callers and for the next moment that
it has planned, and never polls.
"""

from __future__ import annotations

import asyncio
import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Self

import structlog
from torch import Tensor

from giornata.packed.low_rank import SequenceLoras
from giornata.planning.cost_model import HALVED, CostModel
from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices, PoolRow, PoolRule, StepStart
from giornata.scheduling.degrees.rule import ReplanningRule
from giornata.scheduling.pool_rows import StepSize
from giornata.wire.errors import Failed, GiornataError, InternalError, from_body
from giornata.wire.values import BlockMode
from giornata.wire.workers import RankPhase, RankState, StepCacheCounters
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.controls.residuals import PoolControls
from giornata_denoiser.engine.batch_tensors import LoraPart, LowRanks
from giornata_denoiser.engine.engine import EngineState
from giornata_denoiser.engine.model_runner import FailedRow, RowPreview, StepReport
from giornata_denoiser.pool.messages import (
    AbortGroup,
    Answer,
    Order,
    OrderedRow,
    Pong,
    RankReady,
    RankRefused,
    RankStepEnded,
    RankStepFailed,
    ReleaseRows,
    RowAdvanced,
    StepOrder,
    WarmGroup,
    unpack,
)
from giornata_denoiser.pool.ranks import RankHandle, RankSupervisor, groups_of
from giornata_denoiser.pool.shared_memory import Arena, TensorLocation, viewed
from giornata_denoiser.pool.state import (
    GroupEpochs,
    InFlightPoolStep,
    LeaderRow,
    PoolState,
    PoolTimes,
    SharedRow,
    SharedRowStore,
    failed,
    parcel,
)
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.runs import form_of

AHEAD: Final = (0.1, 0.002)
"""A step's order is sent when the one before is predicted to end within this share of its time, and so many seconds."""
WAKE: Final = b"\0"

log = structlog.get_logger(__name__)


class DevicePool:
    """Several devices as one engine; satisfies :class:`giornata_denoiser.engine.engine.RowEngine` from entering on.

    Args:
        ranks: have loaded the model; they end with the context.
        arena: where templates and corrections lie that were put there already.
        rule: chooses the steps that begin.
        groups: that a step may have, smaller ones first; their members make them now.
        times: predicts steps, and follows what they take; used in the pool's thread alone.
        on_report: told of every step, in that thread.
        on_crash: told that no rank is left and none can load; rows can still be taken.
        low_ranks: holds the LoRAs of rows in host memory.
        controls: tells where rows are open whose ControlNets no rank computes.
    """

    def __init__(
        self,
        ranks: RankSupervisor,
        arena: Arena,
        *,
        rule: PoolRule,
        groups: Sequence[Devices],
        times: PoolTimes,
        on_report: Callable[[StepReport], object],
        on_crash: Callable[[Exception], object],
        low_ranks: LowRanks | None = None,
        controls: PoolControls | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._arena, self._rule, self._groups, self._times = ranks, arena, rule, groups, times
        self._on_report, self._on_crash, self._clock = on_report, on_crash, clock
        self._loras, self._controls = LoraPart(low_ranks), controls or PoolControls()
        self._store, self._state, self._epochs = SharedRowStore(arena), PoolState(times.of), GroupEpochs()
        self._lock = threading.Lock()
        self._arriving: dict[RowKey, Row] = {}
        """Rows that the thread has not seen."""
        self._gone: list[int] = []
        """Numbers of rows that have left and ranks still have."""
        self._reports: list[StepReport] = []
        """To be told, in order."""
        self.paused = 0
        """How many rows have waited for LoRAs or ControlNets while others could go on."""
        self._late: frozenset[RowKey] = frozenset()
        """Rows that wait for their adapters, as of the last look."""
        self._news, self._wake_s = True, math.inf
        """Whether something has happened since the last decision, and when the rule is asked anyhow."""
        self._accepting, self._stopping = True, False
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name="pool")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(self, *raised: object) -> None:
        """As :meth:`__exit__`, which does not block the event loop here."""
        await asyncio.shield(asyncio.create_task(asyncio.to_thread(self.__exit__), name="pool ends"))

    def __exit__(self, *raised: object) -> None:
        """Let running steps end, then end all ranks; rows that are left can still be taken. Blocks so long."""
        with self._lock:
            self._accepting, self._stopping = False, True
        self._wake()
        self._thread.join()
        os.close(self._woken)
        os.close(self._waker)

    # What callers ask, in any thread.

    def submit(self, rows: Sequence[Row]) -> bool:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.submit`."""
        with self._lock:
            if not self._accepting:
                return False
            for row in rows:
                if row.key in self._arriving or row.key in self._state.rows:
                    raise ValueError(f"row {row.key} is in the batch already")
            self._arriving |= {row.key: row for row in rows}
        self._wake()
        return True

    def resume(self, job_id: str, attempt: int) -> None:  # noqa: ARG002 - protocol
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.resume`: all rows that wait are looked at."""
        self._wake()

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.cancel`."""
        with self._lock:
            known = (*self._state.rows, *self._arriving)
            return self._taken(
                [key for key in known if key.job_id == job_id and attempt in (None, key.attempt)]
            )

    def take_all(self) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.engine.RowEngine.take_all`."""
        with self._lock:
            self._accepting = False
            rows = sorted(self._state.rows.values(), key=lambda held: not held.devices)  # begun ones first
            taken = self._taken([*(held.row.key for held in rows), *self._arriving])
        return tuple(row for row in taken if not row.background)

    def state(self) -> EngineState:
        """The rows as of their last steps."""
        with self._lock:
            edits = [held for held in self._state.rows.values() if not held.row.background]
            began = [each.began_s for each in self._state.flights.values() if each.began_s is not None]
            arriving = (row for row in self._arriving.values() if not row.background)
            return EngineState(
                tuple(held.row for held in edits if held.devices),
                (*(held.row for held in edits if not held.devices), *arriving),
                min(began, default=None),
            )

    def ranks(self) -> tuple[RankState, ...]:
        """The devices, as telemetry tells of them."""
        with self._lock:
            busy = self._state.busy()
            return tuple(member.state(busy) for member in self._ranks.members)

    def _taken(self, keys: Sequence[RowKey]) -> tuple[Row, ...]:
        """Rows that leave, as of their last steps; the caller holds the lock."""
        rows = [self._arriving.pop(key) if key in self._arriving else self._leave(key) for key in keys]
        self._wake()
        return tuple(rows)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # it is to wake already
            os.write(self._waker, WAKE)

    # The thread.

    def _run(self) -> None:
        self._ranks.selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            self._warm(self._groups)
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
        wait_s = self._next_s(now) - now
        ready = self._ranks.selector.select(None if math.isinf(wait_s) else max(0.0, wait_s))
        with self._lock:
            now = self._clock()
            for key, _ in ready:
                if key.data is None:
                    os.read(self._woken, 1 << 16)
                    self._news = True
                else:
                    self._hear(key.data, now)
            self._watch(now)
            self._forget()
            if not self._stopping:
                self._arrive(now)
                self._decide(self._clock())
            reports, self._reports = self._reports, []
            goes_on = not self._stopping or bool(self._state.flights)
        for report in reports:
            if report.sample is not None and not report.sample.loaded_bytes:
                self._times.observe(report.sample)
            self._on_report(report)
        if all(member.given_up for member in self._ranks.members):
            raise Failed("All ranks of the pool have ended, and none can load the model again.")
        return goes_on

    def _next_s(self, now_s: float) -> float:
        """Return when to look at ranks, or to decide, if nothing happens."""
        patience = self._ranks.patience
        moments = [self._wake_s]
        for member in self._ranks.members:
            if member.again_s is not None:
                moments.append(member.again_s)
            elif member.phase is RankPhase.LOADING:
                moments.append(member.started_s + patience.load_s)
        for flight in self._state.flights.values():
            if flight.began_s is None:
                continue
            if _may_ask(flight):
                moments.append(_ahead_s(flight, now_s))
            moments.append(flight.began_s + patience.hung_s(flight.seconds))
            for device in flight.unanswered:
                asked_s = self._ranks.members[device].asked_s
                late_s = flight.began_s + patience.late_s(flight.seconds) * 2**flight.asked
                moments.append(late_s if asked_s is None else asked_s + patience.ping_s)
        return min(moments)

    def _arrive(self, now_s: float) -> None:
        """Put rows that have come into shared memory."""
        for key, row in self._arriving.items():
            try:
                shared, held = self._store.put(row)
            except OSError as error:
                self._blame(row, error)
                log.warning("row_not_shared", key=key, error=str(error))
            else:
                self._state.add(held, shared, now_s)
        self._arriving.clear()

    def _forget(self) -> None:
        """Have ranks forget rows that have left, and what nothing refers to any more, once no order names them."""
        members = [member for member in self._ranks.members if member.ready]
        forgotten = self._store.forgotten([member.told for member in members], self._gone)
        for member, each in zip(members, forgotten, strict=True):
            if each is not None:
                self._ranks.send(member, [each])
        self._gone.clear()

    def _leave(self, key: RowKey) -> Row:
        held = self._state.rows.pop(key)
        self._gone.append(held.shared.number)
        return held.row

    # What it decides: steps that a rule has chosen, now and just before the steps that run are predicted to end.

    def _decide(self, now_s: float) -> None:
        """Order what is to begin, where something has happened; then what follows steps that are about to end."""
        if self._news or now_s >= self._wake_s:
            self._news, self._wake_s = False, math.inf
            self._pause()
            rows = self._state.shown(now_s)
            free = self._ready() - self._state.busy()
            if free and any(row.boundary for row in rows):
                decision = self._rule.decide(now_s, rows, free)
                self._wake_s = math.inf if decision.wake_s is None else decision.wake_s
                for begin in decision.begins:
                    self._order(begin, rows, now_s)
        flights = self._state.flights.values()
        ending = [flight for flight in flights if _may_ask(flight) and now_s >= _ahead_s(flight, now_s)]
        if ending:
            self._decide_ahead(ending, now_s)

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
        rows = self._state.shown(moment_s, ended=numbers)
        others = {d for f in self._state.flights.values() if f.number not in numbers for d in f.unanswered}
        if not any(row.boundary for row in rows):
            return
        for begin in self._rule.decide(moment_s, rows, self._ready() - others).begins:
            if held.isdisjoint(begin.devices):
                continue
            way = begin.devices, self._halved(begin, {row.key: row for row in rows})
            flights = [flight for row in self._held(begin) for flight in row.flights]
            if all((flight.devices, flight.halves) == way for flight in flights):
                self._order(begin, rows, now_s)

    def _pause(self) -> None:
        """Let rows wait whose adapters are missing, and LoRAs that have arrived act from the next step on.

        LoRAs join a row at its boundary: one in flight is not ordered ahead where they have arrived.
        """
        late: set[RowKey] = set()
        for key, held in self._state.rows.items():
            row = replace(held.row, step=held.row.step + len(held.flights)) if held.flights else held.row
            now = self._loras.able(row)
            now = None if now is None else self._controls.able(now)
            if now is None:
                late.add(key)
            elif not held.flights:
                held.row = now
            held.waits = now is None or (now is not row and bool(held.flights))
        self.paused += len(late - self._late)  # others are looked at again, and wait still
        self._late = frozenset(late)

    def _held(self, begin: StepStart) -> list[LeaderRow]:
        return [self._state.rows[key] for key in begin.rows if isinstance(key, RowKey)]

    def _halved(self, begin: StepStart, rows: Mapping[Hashable, PoolRow]) -> bool:
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
        return ways.pop() if len(ways) == 1 else self._times.halves(sizes)

    def _order(self, begin: StepStart, shown: Sequence[PoolRow], now_s: float) -> None:
        """Tell the ranks of a step, and all that they need for it."""
        epoch, rows = self._epochs.of(begin.devices), {row.key: row for row in shown}
        halves, seconds = self._halved(begin, rows), self._seconds(begin, rows)
        flight, entered = self._state.begin(begin, now_s, epoch=epoch, halves=halves, seconds=seconds)
        named: list[tuple[SharedRow, OrderedRow]] = []
        for held, step, fresh, _ in entered:
            low_rank, held.session = self._acting(held.row, step), self._controls.session(held.row.key)
            ordered = self._store.ordered(
                held.row, held.shared, step, low_rank, held.session, fresh=fresh, plain=held.plain
            )
            named.append((held.shared, ordered))
        order = parcel(
            StepOrder(flight.number, begin.devices, epoch, tuple(each for _, each in named), halves)
        )
        for device in begin.devices:
            member = self._ranks.members[device]
            self._ranks.send(member, [*self._store.parcels(member.told, named), order])
        for held, _, _, left in entered:  # ranks let go of what they keep of rows that go on elsewhere
            knowing = [d for d in left if held.shared.number in self._ranks.members[d].told.rows]
            if knowing:
                self._send(knowing, ReleaseRows((held.shared.number,)))

    def _acting(self, row: Row, step: int) -> SequenceLoras | None:
        """The LoRAs that act in a step of `row`; a rank fails the step where they are missing."""
        loras = row.adapters.acting(step)
        return self._loras.find(loras) if loras else None

    def _seconds(self, begin: StepStart, rows: Mapping[Hashable, PoolRow]) -> float:
        """Return how long a step is predicted to take."""
        members, degree = [rows[key] for key in begin.rows], len(begin.devices)
        together = self._times.together(members, degree) if len(members) > 1 else None
        if together is not None:
            return together
        stays = all(row.devices == begin.devices for row in members)
        return sum((row.step_s if stays else row.moved_s).get(degree, math.inf) for row in members)

    def _ready(self) -> frozenset[int]:
        return frozenset(member.me for member in self._ranks.members if member.ready)

    def _warm(self, groups: Iterable[Devices]) -> None:
        """Have the members of `groups` make them before a step needs one."""
        ready = self._ready()
        for devices in groups:
            if ready.issuperset(devices):
                self._send(devices, WarmGroup(devices, self._epochs.of(devices)))

    def _send(self, devices: Iterable[int], order: Order) -> None:
        """Tell the ranks of `devices`, as far as they are ready."""
        message = parcel(order)
        for member in (self._ranks.members[device] for device in devices):
            if member.ready:
                self._ranks.send(member, [message])

    # What it hears of its ranks: ends of steps, failures, and silence.

    def _hear(self, member: RankHandle, now_s: float) -> None:
        """Take in what a rank has told."""
        messages, ended = member.process.channel.receive_ready()
        for message in messages:
            self._take(member, self._answer(member, message), now_s)
        if ended:
            self._lose(member, now_s, "ended")

    def _answer(self, member: RankHandle, message: bytes) -> Answer:
        """What a rank says; the file with its tensors, if it has any, becomes a slab."""
        memory: list[Tensor] = []

        def tensor(place: TensorLocation) -> Tensor:
            if not memory:
                descriptor = member.process.channel.take_file()
                memory.append(self._arena.adopted(descriptor, os.fstat(descriptor).st_size))
            return viewed(memory[0], place)

        answer: Answer = unpack(message, tensor)
        return answer

    def _take(self, member: RankHandle, answer: Answer, now_s: float) -> None:
        match answer:
            case RankReady():
                member.phase, self._news = RankPhase.READY, True
                log.info("rank_joined", device=member.device, starts=member.starts)
                self._warm(group for group in self._groups if member.me in group)
            case Pong():
                member.asked_s = None
            case RankRefused():
                log.error("rank_refused", device=member.device, error=str(from_body(answer.error)))
            case RankStepEnded() | RankStepFailed():
                member.asked_s, member.vain, self._news = None, 0, True
                flight = self._state.flights.get(answer.order)
                if flight is not None:
                    self._end_step(flight, member, answer)
                    self._state.answered(flight, member.me, now_s)

    def _end_step(
        self, flight: InFlightPoolStep, member: RankHandle, answer: RankStepEnded | RankStepFailed
    ) -> None:
        """Take in the end of a step; of its ranks, the first one tells what it did."""
        first = not flight.settled and member.me == flight.devices[0]
        if isinstance(answer, RankStepEnded):
            if first:
                self._settle(flight, answer)
            return
        lost = dict(answer.lost)
        for held in self._state.rows.values():
            if (why := lost.get(held.shared.number)) is not None:
                self._controls.lose(held.row.key, held.session, why)
        if first:
            self._undo(flight, answer)
        if len(flight.devices) > 1 and answer.reason != "stale":
            self._epochs.renew_group(flight.devices)
            self._abort(flight, member)

    def _settle(self, flight: InFlightPoolStep, answer: RankStepEnded) -> None:
        advanced = {each.number: each for each in answer.advanced}
        blamed = {each.number: each for each in answer.blamed}
        rows: list[Row] = []
        failures: list[FailedRow] = []
        previews: list[RowPreview] = []
        for held in self._state.settle(flight):
            number = held.shared.number
            if number in advanced:
                held.row = row = _advanced(held, advanced[number], len(flight.devices))
                rows.append(row)
                previews += _preview(row, advanced[number])
                if row.done:
                    self._leave(row.key)
            elif number in blamed:
                error = from_body(blamed[number].error)
                error.__cause__ = RuntimeError(blamed[number].cause)
                failures.append(FailedRow(held.row, error))
                self._leave(held.row.key)
        way = {"degree": len(flight.devices), "halves": flight.halves}
        self._reports.append(
            StepReport(
                answer.began_s,
                answer.ended_s,
                tuple(rows),
                tuple(failures),
                answer.sample and answer.sample.model_copy(update=way),
                tuple(previews),
                answer.cached or StepCacheCounters(),
            )
        )

    def _undo(self, flight: InFlightPoolStep, answer: RankStepFailed) -> None:
        """A step came to nothing: its rows are computed again, each by itself where one of them may be the reason."""
        log.warning("step_undone", devices=flight.devices, reason=answer.reason, error=answer.text)
        whole = all(self._ranks.members[device].ready for device in flight.devices)
        fault = answer.reason in {"memory", "raised"} or (answer.reason == "group" and whole)
        alone = len(flight.keys) == 1 and len(flight.devices) == 1
        for held in self._state.undo(flight):
            if fault and alone and failed(held):
                self._give_up(held, RuntimeError(answer.text))
            held.alone |= fault

    def _watch(self, now_s: float) -> None:
        """End ranks that stall, and start those whose time has come."""
        for member in self._ranks.members:
            if member.again_s is not None and now_s >= member.again_s:
                self._ranks.start_again(member, now_s)
            elif (
                member.phase is RankPhase.LOADING and now_s >= member.started_s + self._ranks.patience.load_s
            ):
                self._lose(member, now_s, "did not load")
        for flight in tuple(self._state.flights.values()):
            for device in tuple(flight.unanswered):
                self._watch_step(flight, self._ranks.members[device], now_s)

    def _watch_step(self, flight: InFlightPoolStep, member: RankHandle, now_s: float) -> None:
        """End the rank of a step that never ends, or that does not answer; ask it first."""
        if flight.began_s is None or not member.ready:
            return
        patience = self._ranks.patience
        if now_s >= flight.began_s + patience.hung_s(flight.seconds):
            self._lose(member, now_s, "never ends its step")
        elif member.asked_s is not None:
            if now_s >= member.asked_s + patience.ping_s:
                self._lose(member, now_s, "does not answer")
        elif now_s >= flight.began_s + patience.late_s(flight.seconds) * 2**flight.asked:
            flight.asked += 1
            self._ranks.ping(member, now_s)

    def _lose(self, member: RankHandle, now_s: float, why: str) -> None:
        """A rank is lost, and with it the steps that it was the first of; their rows go on from their last step."""
        log.warning("rank_lost", device=member.device, why=why, phase=member.phase)
        self._news = True
        flights = self._state.behind(member.me)
        self._ranks.lost(member, now_s)
        self._epochs.renew([member.me])
        for flight in flights:
            if not flight.settled and member.me == flight.devices[0]:
                for held in self._state.undo(flight):
                    if flight.began_s is not None and failed(held):
                        self._give_up(held, RuntimeError(f"the rank of {member.device} {why}"))
            self._abort(flight, member)
            self._state.answered(flight, member.me, now_s)

    def _abort(self, flight: InFlightPoolStep, without: RankHandle) -> None:
        """Have the other ranks of a step wait for one no more that is lost or has failed."""
        self._send(flight.unanswered - {without.me}, AbortGroup(flight.devices, flight.epoch))

    def _give_up(self, held: LeaderRow, cause: Exception) -> None:
        self._blame(self._leave(held.row.key), cause)

    def _blame(self, row: Row, cause: Exception) -> None:
        """A row cannot be computed."""
        error: GiornataError = InternalError("The denoiser could not compute this picture.")
        error.__cause__ = cause
        now_s = self._clock()
        self._reports.append(StepReport(now_s, now_s, failed=(FailedRow(row, error),)))


def _may_ask(flight: InFlightPoolStep) -> bool:
    return flight.began_s is not None and not flight.next_asked and not flight.settled


def _ahead_s(flight: InFlightPoolStep, now_s: float) -> float:
    return flight.until_s(now_s) - AHEAD[0] * flight.seconds - AHEAD[1]


def _advanced(held: LeaderRow, told: RowAdvanced, degree: int) -> Row:
    """A row as a step has left it: its state is in its slab, for whoever has it next."""
    row = held.row
    if told.plain:
        held.plain, row = True, row.plain()
    state = held.shared.ring.read(held.shared.memory, row, told.step, told.remembers)
    made = row.advanced(
        state.latent,
        state.memory,
        state.generator,
        entry=told.entry,
        corrections=told.corrections,
        degree=degree,
        cached=state.cached,
    )
    return replace(made, step=told.step)


def _preview(row: Row, told: RowAdvanced) -> Iterator[RowPreview]:
    if told.preview is not None:
        index, pixels = told.preview
        yield RowPreview(row.key, row.step, row.steps, index, pixels.numpy())


def pool_of(  # noqa: PLR0917 - the parts of an engine
    config: DenoiserConfig,
    ranks: RankSupervisor,
    arena: Arena,
    checkpoint: Checkpoint,
    costs: CostModel,
    on_report: Callable[[StepReport], object],
    on_crash: Callable[[Exception], object],
    low_ranks: LowRanks,
    controls: PoolControls | None = None,
) -> DevicePool:
    """The engine of a denoiser with `ranks`."""
    reused = BlockMode(form_of(config, checkpoint.family))
    times = PoolTimes(
        costs, checkpoint.family.operations, reused, config.capacity_rows, config.capacity_tokens
    )
    devices = len(config.device_names)
    known = {way.degree for way, _ in costs.ways}
    groups = groups_of(devices)
    if unknown := sorted({len(group) for group in groups} - known):
        log.warning("degrees_unused", degrees=unknown, remedy="measure them: giornata profile --devices")
    return DevicePool(
        ranks,
        arena,
        rule=ReplanningRule(devices, together=times.together),
        groups=[group for group in groups if len(group) in known],
        times=times,
        on_report=on_report,
        on_crash=on_crash,
        low_ranks=low_ranks,
        controls=controls,
    )
