"""The leader's side of its ranks' reports: ends of steps, failures, and silence."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import count

import structlog
from torch import Tensor

from giornata.scheduling.degrees.pool import Devices
from giornata.wire.errors import GiornataError, InternalError, from_body
from giornata.wire.workers import RankPhase, StepCacheCounters
from giornata_denoiser.engine.model_runner import FailedRow, RowPreview, StepReport
from giornata_denoiser.pool.messages import (
    AbortGroup,
    Answer,
    Pong,
    RankReady,
    RankRefused,
    RankStepEnded,
    RankStepFailed,
    RowAdvanced,
    unpack,
)
from giornata_denoiser.pool.ranks import RankHandle, RankSupervisor
from giornata_denoiser.pool.shared_memory import Arena, TensorLocation, viewed
from giornata_denoiser.pool.shared_rows import parcel
from giornata_denoiser.pool.state import InFlightPoolStep, LeaderRow, PoolState, failed
from giornata_denoiser.rows.row import Row

log = structlog.get_logger(__name__)


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


class StepCompletionHandler:
    """Takes in what ranks tell, and ends those that do not."""

    def __init__(
        self, ranks: RankSupervisor, book: PoolState, arena: Arena, clock: Callable[[], float]
    ) -> None:
        self._ranks, self._book, self._arena, self._clock = ranks, book, arena, clock
        self._pings = count(1)
        self.epochs = GroupEpochs()
        self.reports: list[StepReport] = []
        """To be told, in order."""
        self.gone: list[int] = []
        """Numbers of rows that have left since they were last asked for."""
        self.joined: list[int] = []
        """Devices whose rank has become ready since they were last asked for."""

    def hear(self, member: RankHandle, now_s: float) -> bool:
        """Take in what a rank has told; whether a decision may be due."""
        messages, ended = member.process.channel.receive_ready()
        news = False
        for message in messages:
            news |= self._take(member, self._answer(member, message), now_s)
        if ended:
            self._lose(member, now_s, "ended")
        return news or ended

    def watch(self, now_s: float) -> bool:
        """End ranks that stall, and start those whose time has come; whether a decision may be due."""
        news = False
        for member in self._ranks.members:
            if member.again_s is not None and now_s >= member.again_s:
                self._ranks.start_again(member, now_s)
            elif (
                member.phase is RankPhase.LOADING and now_s >= member.started_s + self._ranks.patience.load_s
            ):
                self._lose(member, now_s, "did not load")
                news = True
        for flight in tuple(self._book.flights.values()):
            for device in tuple(flight.unanswered):
                news |= self._watch(flight, self._ranks.members[device], now_s)
        return news

    def next_s(self) -> float:
        """Return when :meth:`watch` is to be called if nothing happens."""
        patience = self._ranks.patience
        moments = [member.again_s for member in self._ranks.members if member.again_s is not None]
        moments += [
            member.started_s + patience.load_s
            for member in self._ranks.members
            if member.phase is RankPhase.LOADING
        ]
        for flight in self._book.flights.values():
            if flight.began_s is None:
                continue
            moments.append(flight.began_s + patience.hung_s(flight.seconds))
            for device in flight.unanswered:
                asked_s = self._ranks.members[device].asked_s
                asks_s = flight.began_s + patience.late_s(flight.seconds) * 2**flight.asked
                moments.append(asks_s if asked_s is None else asked_s + patience.ping_s)
        return min(moments, default=math.inf)

    def blame(self, row: Row, cause: Exception, now_s: float) -> None:
        """A row cannot be computed."""
        self.reports.append(StepReport(now_s, now_s, failed=(_failure(row, cause),)))

    def _watch(self, flight: InFlightPoolStep, member: RankHandle, now_s: float) -> bool:
        """End the rank of a step that never ends, or that does not answer; ask it first."""
        if flight.began_s is None or not member.ready:
            return False
        patience = self._ranks.patience
        if now_s >= flight.began_s + patience.hung_s(flight.seconds):
            self._lose(member, now_s, "never ends its step")
            return True
        if member.asked_s is not None and now_s >= member.asked_s + patience.ping_s:
            self._lose(member, now_s, "does not answer")
            return True
        late_s = flight.began_s + patience.late_s(flight.seconds) * 2**flight.asked
        if member.asked_s is None and now_s >= late_s:
            flight.asked += 1
            self._ranks.ping(member, next(self._pings), now_s)
        return False

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

    def _take(self, member: RankHandle, answer: Answer, now_s: float) -> bool:
        match answer:
            case RankReady():
                member.phase = RankPhase.READY
                self.joined.append(member.me)
                log.info("rank_joined", device=member.device, starts=member.starts)
            case Pong():
                member.asked_s = None
                return False
            case RankRefused():
                log.error("rank_refused", device=member.device, error=str(from_body(answer.error)))
            case RankStepEnded() | RankStepFailed():
                member.asked_s, member.vain = None, 0
                self._ended(member, answer, now_s)
                return True
        return isinstance(answer, RankReady)

    def _ended(self, member: RankHandle, answer: RankStepEnded | RankStepFailed, now_s: float) -> None:
        flight = self._book.flights.get(answer.order)
        if flight is None or flight.settled or member.me != flight.devices[0]:
            pass  # nobody waits for it, or another rank tells
        elif isinstance(answer, RankStepFailed):
            self._undo(flight, answer)
        else:
            self._settle(flight, answer)
        if flight is not None:
            if isinstance(answer, RankStepFailed) and len(flight.devices) > 1 and answer.reason != "stale":
                self.epochs.renew_group(flight.devices)
                self._abort(flight, member)
            self._book.answered(flight, member.me, now_s)

    def _settle(self, flight: InFlightPoolStep, answer: RankStepEnded) -> None:
        advanced = {each.number: each for each in answer.advanced}
        blamed = {each.number: each for each in answer.blamed}
        rows: list[Row] = []
        failures: list[FailedRow] = []
        previews: list[RowPreview] = []
        for held in self._book.settle(flight):
            number = held.shared.number
            if number in advanced:
                before = held.row
                held.row = row = _advanced(held, advanced[number], len(flight.devices))
                rows.append(row)
                previews += _preview(before, row, advanced[number])
                if row.done:
                    self._leave([held])
            elif number in blamed:
                error = from_body(blamed[number].error)
                error.__cause__ = RuntimeError(blamed[number].cause)
                failures.append(FailedRow(held.row, error))
                self._leave([held])
        way = {"degree": len(flight.devices), "halves": flight.halves}
        sample = answer.sample and answer.sample.model_copy(update=way)
        self.reports.append(
            StepReport(
                answer.began_s,
                answer.ended_s,
                tuple(rows),
                tuple(failures),
                sample,
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
        for held in self._book.undo(flight):
            if fault and alone and failed(held):
                self._give_up(held, RuntimeError(answer.text))
            held.alone |= fault

    def _lose(self, member: RankHandle, now_s: float, why: str) -> None:
        """A rank is lost, and with it the steps that it was the first of; their rows go on from their last step."""
        log.warning("rank_lost", device=member.device, why=why, phase=member.phase)
        flights = self._book.behind(member.me)
        self._ranks.lost(member, now_s)
        self.epochs.renew([member.me])
        for flight in flights:
            if not flight.settled and member.me == flight.devices[0]:
                for held in self._book.undo(flight):
                    if flight.began_s is not None and failed(held):
                        self._give_up(held, RuntimeError(f"the rank of {member.device} {why}"))
            self._abort(flight, member)
            self._book.answered(flight, member.me, now_s)

    def _abort(self, flight: InFlightPoolStep, without: RankHandle) -> None:
        """Have the other ranks of a step wait for one no more that is lost or has failed."""
        order = parcel(AbortGroup(flight.devices, flight.epoch))
        for device in flight.unanswered - {without.me}:
            other = self._ranks.members[device]
            if other.ready:
                self._ranks.send(other, [order])

    def _give_up(self, held: LeaderRow, cause: Exception) -> None:
        now_s = self._clock()
        self._leave([held])
        self.reports.append(StepReport(now_s, now_s, failed=(_failure(held.row, cause),)))

    def _leave(self, rows: list[LeaderRow]) -> None:
        for held in rows:
            self._book.remove([held.row.key])
            self.gone.append(held.shared.number)


def _failure(row: Row, cause: Exception) -> FailedRow:
    error: GiornataError = InternalError("The denoiser could not compute this picture.")
    error.__cause__ = cause
    return FailedRow(row, error)


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


def _preview(before: Row, row: Row, told: RowAdvanced) -> Iterator[RowPreview]:
    if told.preview is not None:
        index, pixels = told.preview
        yield RowPreview(before.key, row.step, row.steps, index, pixels.numpy())
