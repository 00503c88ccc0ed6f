"""The leader: decides at every arrival and end of a step, orders steps, and has their rows go on when a rank is lost.

One thread does so. It waits for its ranks, for callers and for the next moment that it has planned, and never polls.
"""

from __future__ import annotations

import math
import os
import selectors
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Self

import structlog

from giornata.scheduling.batch import RowKey
from giornata.scheduling.degrees.pool import Devices, PoolRule, SharedStepTime
from giornata.wire.errors import Failed
from giornata.wire.workers import RankState, StepSample
from giornata_denoiser.engine.protocol import EngineState, StepReport
from giornata_denoiser.pool.book import PoolState, TimesOf
from giornata_denoiser.pool.deciding import HalvesOf, StepDispatcher
from giornata_denoiser.pool.memory import Arena
from giornata_denoiser.pool.ranks import RankSupervisor
from giornata_denoiser.pool.settling import StepCompletionHandler
from giornata_denoiser.pool.shelf import SharedRowStore
from giornata_denoiser.rows.row import Row

WAKE: Final = b"\0"

log = structlog.get_logger(__name__)


class DevicePool:
    """Several devices as one engine; satisfies :class:`giornata_denoiser.engine.protocol.RowEngine` from entering on.

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
    """

    paused: Final = 0
    """No row waits for adapters here."""

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
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ranks, self._clock = ranks, clock
        self._on_report, self._on_crash, self._observe = on_report, on_crash, observe
        self._book = PoolState(times)
        shelf = SharedRowStore(arena)
        self._settling = StepCompletionHandler(ranks, self._book, arena, clock)
        self._deciding = StepDispatcher(
            ranks, self._book, shelf, self._settling.epochs, rule, together, halves
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
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.submit`."""
        with self._lock:
            if not self._accepting:
                return False
            for row in rows:
                if row.key in self._arriving or row.key in self._book.rows:
                    raise ValueError(f"row {row.key} is in the batch already")
            self._arriving |= {row.key: row for row in rows}
        self._wake()
        return True

    def resume(self, job_id: str, attempt: int) -> None:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.resume`: no row waits here."""

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.cancel`."""
        with self._lock:
            return self._taken(
                [
                    key
                    for key in (*self._book.rows, *self._arriving)
                    if key.job_id == job_id and attempt in (None, key.attempt)
                ]
            )

    def take_all(self) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.take_all`."""
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
