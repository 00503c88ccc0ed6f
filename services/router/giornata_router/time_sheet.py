"""Where a job's time goes, summed up while it is carried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from giornata.wire.jobs import JobRecord
from giornata.wire.values import ComputeTimes, StageTimes
from giornata_router.rules.transitions import Times

Stage = Literal["prepare", "queue", "denoise", "finish"]
Compute = Literal["inspect", "encode", "denoise", "decode", "paste"]


class TimeSheet:
    """Adds to the times that the record already holds, of earlier attempts and other routers.

    Args:
        record: holds what earlier routers have summed up.
        waited_ms: how long the job has just waited in the work queue; it counts as spent.
    """

    def __init__(self, record: JobRecord, waited_ms: float = 0.0) -> None:
        self._stage_ms = record.stage_ms.model_dump()
        self._compute_ms = record.compute_ms.model_dump()
        self._stage_ms["queue"] += waited_ms
        self._spent_before_ms = record.spent_ms + int(waited_ms)
        self._began_s = time.monotonic()
        self._denoised: list[tuple[float, float]] = []
        """When rows were begun and done, by the monotonic clock."""

    def stage(self, name: Stage, ms: float) -> None:
        """Add `ms` to a stage."""
        self._stage_ms[name] += ms

    def compute(self, name: Compute, ms: float) -> None:
        """Add `ms` of computing."""
        self._compute_ms[name] += ms

    @contextmanager
    def timing(self, name: Stage) -> Iterator[None]:
        """Add the time inside to a stage."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.stage(name, (time.monotonic() - began_s) * 1000)

    @contextmanager
    def denoising(self) -> Iterator[None]:
        """Rows are computed inside; until the first one begins, the job waits in the queue."""
        entered_s = time.monotonic()
        try:
            yield
        finally:
            began_s = min((began for began, _ in self._denoised), default=time.monotonic())
            ended_s = max((ended for _, ended in self._denoised), default=began_s)
            self.stage("queue", max(0.0, began_s - entered_s) * 1e3)
            self.stage("denoise", (ended_s - began_s) * 1e3)
            self._denoised.clear()

    def denoised(self, denoise_ms: float) -> None:
        """Rows are computed now; `denoise_ms` passed from their first step to their last."""
        now = time.monotonic()
        self._denoised.append((now - denoise_ms / 1e3, now))

    def times(self) -> Times:
        """The times, as a record holds them."""
        spent_ms = self._spent_before_ms + int((time.monotonic() - self._began_s) * 1000)
        return Times(StageTimes(**self._stage_ms), ComputeTimes(**self._compute_ms), spent_ms)
