"""The thread that computes steps: which of them wait, are refused, and share a forward."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import structlog
import torch

from giornata.control.link.server import ControlStepRequest
from giornata.control.networks import RowStep, run
from giornata.packed.packing import to_device
from giornata.wire.controlnets import StepRefusal
from giornata_controlnet.rows import OpenRow

LEVEL_TOLERANCE: Final = 1e-5
"""Relative: noise levels travel as float64, and come from float32."""
WORK: Final = 1e9
"""Multiplications of which the time is told."""
NEWEST: Final = 0.3
"""Share of the latest forward in that time."""

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class QueuedStep:
    """A step that was asked for, of a row that is open."""

    asked: ControlStepRequest
    row: OpenRow
    answered: set[int] = field(default_factory=set)
    """Its sums that were told."""

    @property
    def tokens(self) -> int:
        """Image tokens of its forwards: of each sequence and ControlNet."""
        return self.row.sequences * self.row.tokens * len(self.row.acting(self.asked.step))

    @property
    def work(self) -> float:
        """Multiplications of all ControlNets."""
        return self.row.work(self.asked.step)

    def fail(self, error: Exception) -> None:
        """Tell the denoiser that the step cannot be computed."""
        log.error("step_failed", row=self.row.key, step=self.asked.step, exc_info=error)
        if isinstance(error, torch.OutOfMemoryError):
            self.asked.fail(StepRefusal.OUT_OF_MEMORY, "this instance has not enough memory for the step")
        else:
            self.asked.fail(StepRefusal.POISONED, f"the step cannot be computed: {type(error).__name__}")

    def of(self, device: torch.device, dtype: torch.dtype) -> RowStep:
        """The step as it is computed."""
        latents = to_device(self.asked.latents, device).to(dtype)
        row, step = self.row, self.asked.step
        return RowStep(row.acting(step), step, latents, row.sequences, row.region, self.asked.whole)


def step_refusal(row: OpenRow | None, asked: ControlStepRequest) -> tuple[StepRefusal, str] | None:
    """Code and sentence where a step cannot be one of `row`; None where it can."""
    if row is None:
        return (
            StepRefusal.ROW_UNKNOWN,
            f"the row {asked.row} is not open here to this denoiser; open it again",
        )
    if not 0 <= asked.step < len(row.times):
        return StepRefusal.STEP_MISMATCH, f"step {asked.step}; the row has {len(row.times)}"
    level = row.times[asked.step]
    if not math.isclose(asked.level, level, rel_tol=LEVEL_TOLERANCE, abs_tol=LEVEL_TOLERANCE):
        told = f"noise level {asked.level} in step {asked.step}; the row was opened with {level}"
        return StepRefusal.STEP_MISMATCH, told
    latents, wanted = tuple(asked.latents.shape), (row.tokens, row.base.latent_channels)
    if latents != wanted:
        return StepRefusal.STEP_MISMATCH, f"latents of {latents}; accepted: {wanted}, tokens and channels"
    shapes = row.shapes(asked.step, whole=asked.whole)
    if asked.shapes != shapes:
        told = f"samples of {asked.shapes}; step {asked.step} makes {shapes}, tokens and channels"
        return StepRefusal.STEP_MISMATCH, told
    return None


def count_sharing(tokens: Iterable[int], limit: int) -> int:
    """Return how many of the waiting steps, the first ones, share a forward of `limit` tokens at most; at least one."""
    total, count = 0, 0
    for each in tokens:
        total += each
        if count and total > limit:
            break
        count += 1
    return count


class ControlNetThread:
    """Computes steps in the order in which they are asked for, in a thread, from entering to leaving the context.

    A step that fails with others is computed alone, so that the culprit fails alone. Where memory runs out, half as
    many tokens share a forward, and again more as they fit.

    `find` tells the row of a key that is open to the denoiser with a token; it is asked in any thread. At most `tokens`
    share a forward. `on_crash` is told in the thread that the device is lost; nothing is computed any more then.
    """

    def __init__(
        self,
        find: Callable[[str, str], OpenRow | None],
        device: torch.device,
        dtype: torch.dtype,
        *,
        tokens: int,
        on_crash: Callable[[Exception], object],
    ) -> None:
        self._find, self._device, self._dtype, self._on_crash = find, device, dtype, on_crash
        # A denoiser that shares this thread's core computes meanwhile, and counts that time as its own.
        self._clock = time.thread_time if device.type == "cpu" else time.perf_counter
        self._most_tokens = self._tokens = tokens
        self._waiting: list[QueuedStep] = []
        self._running: Sequence[QueuedStep] = ()
        self._steps, self._late = 0, 0
        self._work_ms: float | None = None
        """Milliseconds of 1e9 multiplications, of this thread's processor on one; None before the first forward."""
        self._stopping = False
        self._changed = threading.Condition()
        """Guards all that is above."""
        self._thread = threading.Thread(target=self._run, name="controlnets")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Let the running forward end; steps that wait are not computed."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def ask(self, asked: ControlStepRequest) -> None:
        """Compute a step when its turn comes; one that cannot be of an open row is refused at once. In any thread."""
        row = self._find(asked.row, asked.token)
        refusal = step_refusal(row, asked)
        if refusal is not None or row is None:
            code, message = refusal or (StepRefusal.ROW_UNKNOWN, asked.row)
            log.info("step_refused", row=asked.row, step=asked.step, code=code, reason=message)
            asked.fail(code, message)
            return
        with self._changed:
            self._waiting.append(QueuedStep(asked, row))
            self._changed.notify()

    def counted(self) -> dict[str, Any]:
        """Steps that were computed or came late, and the work that waits, by field of `ControlState`; in any thread."""
        with self._changed:
            work = sum(due.work for due in (*self._waiting, *self._running))
            pending_ms = work / WORK * (self._work_ms or 0.0)
            return {
                "steps_total": self._steps,
                "late_total": self._late,
                "work_ms": self._work_ms,
                "pending_ms": pending_ms,
            }

    def _run(self) -> None:
        try:
            while due := self._next():
                self._compute(due)
                del due  # it would keep the weights of closed rows
        except Exception as error:  # noqa: BLE001 - the thread's edge: its owner is told
            self._on_crash(error)

    def _next(self) -> list[QueuedStep]:
        """The steps of the next forward, once there are any; none when the thread is to end."""
        with self._changed:
            self._running = ()
            while True:
                self._changed.wait_for(lambda: self._stopping or self._waiting)
                if self._stopping:
                    return []
                wanted = [due for due in self._waiting if not due.asked.gone]
                self._late += len(self._waiting) - len(wanted)
                count = count_sharing((each.tokens for each in wanted), self._tokens)
                taken, self._waiting = wanted[:count], wanted[count:]
                self._running = taken
                if taken:
                    return taken

    def _compute(self, due: Sequence[QueuedStep]) -> None:
        began = self._clock()
        try:
            self._forward(due)
        except torch.AcceleratorError:
            raise
        except Exception as error:  # noqa: BLE001 - a step's edge: it is answered with the error, and logged
            cause = error if len(due) == 1 else None
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
        else:
            self._succeeded(due, self._clock() - began)
            return
        # Outside of the handler, since the traceback keeps the tensors of the failed forward alive.
        if out_of_memory and self._device.type == "cuda":
            torch.cuda.empty_cache()
        if cause is not None:
            due[0].fail(cause)
            return
        log.warning("forward_failed", steps=len(due), out_of_memory=out_of_memory)
        parts = [[each] for each in due]
        if out_of_memory:
            self._tokens = max(1, sum(each.tokens for each in due) // 2)
            parts = [list(due[: len(due) // 2]), list(due[len(due) // 2 :])]
        for part in parts:
            if left := [each for each in part if not each.asked.gone]:
                self._compute(left)

    def _forward(self, due: Sequence[QueuedStep]) -> None:
        steps = [each.of(self._device, self._dtype) for each in due]
        for row, index, sample in run(steps):
            one = due[row]
            if index not in one.answered:
                one.asked.answer(index, sample.flatten(0, 1))
                one.answered.add(index)
            if all(each.asked.gone for each in due):
                return

    def _succeeded(self, due: Sequence[QueuedStep], seconds: float) -> None:
        took_ms = seconds * 1e3 / (sum(each.work for each in due) / WORK)
        with self._changed:
            self._steps += len(due)
            self._tokens = min(self._most_tokens, 2 * self._tokens)
            before = took_ms if self._work_ms is None else self._work_ms
            self._work_ms = before + NEWEST * (took_ms - before)
