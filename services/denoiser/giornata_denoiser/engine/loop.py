"""The thread that owns the engine of one device.

It waits on a condition, never polls. The lock is held around deciding and settling only, so that callers wait
microseconds, not steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Self

from giornata.scheduling.batch import RowKey
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.protocol import EngineState, StepReport
from giornata_denoiser.rows.row import Row


class EngineLoop:
    """Runs an :class:`Engine` in a thread of its own from entering to leaving the context.

    Satisfies :class:`giornata_denoiser.engine.protocol.RowEngine`. Nothing else may touch the engine from now on. In
    its thread, `on_report` is told of every step, and `on_crash` that the engine has lost its device and cannot go on;
    its rows can still be taken. Rows whose LoRAs are not `loaded` wait for :meth:`resume`.
    """

    def __init__(
        self,
        engine: Engine,
        on_report: Callable[[StepReport], object],
        on_crash: Callable[[Exception], object],
    ) -> None:
        self._engine, self._on_report, self._on_crash = engine, on_report, on_crash
        self.paused = 0
        """How many rows have waited for LoRAs or ControlNets while others could go on."""
        self._late: frozenset[RowKey] = frozenset()
        """Rows that wait for their adapters, as of the last look."""
        self._began_s: float | None = None
        self._condition = threading.Condition()
        self._accepting = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Let the running step end, then stop; rows that are left can still be taken."""
        with self._condition:
            self._accepting = False
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def submit(self, rows: Sequence[Row]) -> bool:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.submit`."""
        with self._condition:
            if not self._accepting:
                return False
            self._engine.batch.submit(rows)
            self._pause()
            self._condition.notify()
            return True

    def resume(self, job_id: str, attempt: int) -> None:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.resume`."""
        with self._condition:
            for key in self._engine.batch.keys:
                if (key.job_id, key.attempt) == (job_id, attempt):
                    self._engine.batch.make_ready(key)
            self._condition.notify()

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.cancel`."""
        with self._condition:
            return self._engine.batch.cancel(job_id, attempt)

    def take_all(self) -> tuple[Row, ...]:
        """See :meth:`giornata_denoiser.engine.protocol.RowEngine.take_all`."""
        with self._condition:
            self._accepting = False
            return self._engine.batch.take_all()

    def state(self) -> EngineState:
        """The rows as of the last step."""
        with self._condition:
            return EngineState(self._engine.batch.running, self._engine.batch.waiting, self._began_s)

    def _run(self) -> None:
        try:
            while rows := self._next():
                self._step(rows)
                del rows  # which would otherwise stay while nothing is to be done
        except Exception as error:  # noqa: BLE001 - the thread's edge: its owner is told
            with self._condition:
                self._accepting = False
            self._on_crash(error)

    def _step(self, rows: tuple[Row, ...]) -> None:
        report = self._engine.compute(rows)
        with self._condition:
            self._began_s = None
            report = self._engine.settle(report)
        self._on_report(report)

    def _next(self) -> tuple[Row, ...]:
        """The rows of the next step, once there are any; none when the loop is to stop."""
        with self._condition:
            if not self._goes_on():
                self._engine.rest()
                self._condition.wait_for(self._goes_on)
            if self._stopping:
                return ()
            self._began_s = time.perf_counter()
            return self._engine.plan()

    def _goes_on(self) -> bool:
        """Whether there is a row to compute, or the loop is to stop."""
        self._pause()
        return self._stopping or self._engine.batch.able

    def _pause(self) -> None:
        """Let rows wait whose adapters are missing, and LoRAs that have arrived act from the next step on."""
        batch = self._engine.batch
        late: list[RowKey] = []
        for row in (*batch.running, *batch.waiting):
            now = self._engine.able(row)
            if now is None:
                late.append(row.key)
            elif now is not row:
                batch.change(now)
        batch.pause(late)
        self.paused += len(frozenset(late) - self._late)  # others are looked at again, and wait still
        self._late = frozenset(late)
