"""The thread that owns the engine; rows are submitted, cancelled and taken back from any thread.

It waits on a condition, never polls. The lock is held around deciding and settling only, so that callers wait
microseconds, not steps. Reports leave through a callback, called in this thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from giornata_denoiser.engine.engine import Engine, StepReport
from giornata_denoiser.rows.row import Row

Teller = Callable[[StepReport], object]
"""Takes a report, in the engine's thread; what it returns is of no interest."""
Clock = Callable[[], float]


@dataclass(frozen=True, eq=False)
class EngineState:
    """The rows an engine has, as of its last step."""

    running: tuple[Row, ...]
    waiting: tuple[Row, ...]
    began_s: float | None = None
    """When the step that is being computed began, by the loop's clock; None while none is."""


class EngineLoop:
    """Runs an :class:`Engine` in a thread of its own from entering to leaving the context.

    Args:
        engine: not to be touched by others from now on.
        on_report: told of every step, in the engine's thread.
        clock: monotonic seconds.
        on_crash: told that the engine cannot go on (its device is lost), in the engine's thread; its rows can
            still be taken.
    """

    def __init__(
        self,
        engine: Engine,
        on_report: Teller,
        on_crash: Callable[[Exception], object],
        clock: Clock = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._began_s: float | None = None
        self._engine = engine
        self._on_report = on_report
        self._on_crash = on_crash
        self._condition = threading.Condition()
        self._accepting = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the running step end, then stop; rows that are left can still be taken."""
        with self._condition:
            self._accepting = False
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def submit(self, rows: Sequence[Row]) -> bool:
        """Let `rows` join at the next step that has room; False if nothing is taken any more."""
        with self._condition:
            if not self._accepting:
                return False
            self._engine.batch.submit(rows)
            self._condition.notify()
            return True

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        """Drop a job's rows, of one attempt or of all, at the step boundary; they are reported no more."""
        with self._condition:
            return self._engine.batch.cancel(job_id, attempt)

    def take_all(self) -> tuple[Row, ...]:
        """Accept nothing more and hand over every row as of its last step; a running step is dropped."""
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
                report = self._engine.compute(rows)
                with self._condition:
                    self._began_s = None
                    report = self._engine.settle(report)
                self._on_report(report)
        except Exception as error:  # noqa: BLE001 - the thread's edge: whoever owns it is told
            with self._condition:
                self._accepting = False
            self._on_crash(error)

    def _next(self) -> tuple[Row, ...]:
        """The rows of the next step, once there are any; none when the loop is to stop."""
        with self._condition:
            self._condition.wait_for(lambda: self._stopping or len(self._engine.batch) > 0)
            if self._stopping:
                return ()
            self._began_s = self._clock()
            return self._engine.plan()
