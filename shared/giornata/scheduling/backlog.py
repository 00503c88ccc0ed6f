"""What workers still have to compute, when their rows leave, and when rows that no worker has are computed. Pure.

A step costs a base and what each of its rows adds (:mod:`giornata.planning.costs` is linear), all rows advance by one
step together, and waiting rows take places in order as others leave, as far as a step may have so many rows and tokens.
Between two such moments steps are alike, so that a virtual run costs one heap operation a row, not one a step.

A forecast levels: the work of the workers ends at different times; waiting work, spread so that all workers end
together, ends at a level that depends on how much comes before it. The level is exact for work that can be divided, and
late rather than early for jobs that share steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import accumulate
from typing import Final, NamedTuple

LEAST: Final = 2
"""Rows that are always worth a step."""


class RowLoad(NamedTuple):
    """What one row adds to the steps that it takes part in."""

    steps: int
    """Still to compute, at least 1."""
    step_ms: float
    """Added to each step."""
    first_ms: float = 0.0
    """Added to the next step beyond that: the first step of an edit that reuses is computed in full."""
    tokens: int = 0
    """Text and image tokens of all its sequences, in each step."""
    first_tokens: int = 0
    """Tokens in the next step beyond these."""

    @property
    def work_ms(self) -> float:
        """Sum over its steps, without their base."""
        return self.steps * self.step_ms + self.first_ms


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's rows."""

    places: int
    """Most rows that share a step."""
    base_ms: float
    """Time of a step without any row."""
    running: tuple[RowLoad, ...] = ()
    """They may be more than there are places."""
    waiting: tuple[RowLoad, ...] = ()
    tokens: float = math.inf
    """Most text and image tokens of a step; a row alone may have more."""

    def worth(self, slack: float) -> int:
        """The fewest rows a step with which it computes rows like its own as fast as with all places, but for `slack`.

        k rows a step that each add r to a base of b are computed at a rate of k / (b + k * r): beyond some rows, more
        of them make each slower and hardly any rate. At least two, so that one computes while the next one's inputs
        come; all places where the base is unknown or nothing is here.
        """
        rows = (*self.running, *self.waiting)
        row_ms = sum(row.step_ms for row in rows) / len(rows) if rows else 0.0
        if not slack or not row_ms:
            return self.places
        needed = (1 - slack) * self.places * self.base_ms / (self.base_ms + slack * self.places * row_ms)
        return min(self.places, max(LEAST, math.ceil(needed)))

    def running_what_fits(self, rows: Sequence[RowLoad]) -> WorkerLoad:
        """The backlog with `rows` instead of its own: the first ones run, as many as may share a step."""
        count = tokens = 0
        for row in rows[: self.places]:
            if count and tokens + row.tokens + row.first_tokens > self.tokens:
                break
            count, tokens = count + 1, tokens + row.tokens
        return WorkerLoad(self.places, self.base_ms, tuple(rows[:count]), tuple(rows[count:]), self.tokens)

    def ends_ms(self) -> list[float]:
        """When each row leaves, running ones first, in ms from now."""
        return self.times_ms()[1]

    def times_ms(self) -> tuple[list[float], list[float]]:
        """When each row joins, and when it leaves, running ones first, in ms from now."""
        rows = (*self.running, *self.waiting)
        begins, ends = [0.0] * len(rows), [0.0] * len(rows)
        active: list[tuple[int, int]] = []
        """(step after which it leaves, its index in `rows`)"""
        now_ms, step, each_ms = 0.0, 0, self.base_ms
        joined = tokens = 0
        while joined < len(rows) or active:
            boundary_ms = now_ms
            while joined < len(rows):
                row = rows[joined]
                full = len(active) >= self.places or tokens + row.tokens + row.first_tokens > self.tokens
                if full and active and joined >= len(self.running):
                    break
                heappush(active, (step + row.steps, joined))
                begins[joined] = boundary_ms
                each_ms += row.step_ms
                now_ms += row.first_ms  # all rows of its first step wait for it
                tokens += row.tokens
                joined += 1
            leaving = active[0][0]
            now_ms += (leaving - step) * each_ms
            step = leaving
            while active and active[0][0] == step:
                _, index = heappop(active)
                each_ms -= rows[index].step_ms
                tokens -= rows[index].tokens
                ends[index] = now_ms
        return begins, ends


class PlacementEstimate(NamedTuple):
    """What a job's rows would do to a worker's backlog if they joined it."""

    finish_ms: float
    """From now until the last of the job's rows leaves."""
    delay_ms: float
    """How much later the other rows leave, summed over them."""
    begin_ms: float = 0.0
    """From now until the first of the job's rows has a place."""
    gained: int | None = None
    """In a pool: by how many more rows deadlines are kept with the job than without it, 0 where its own is not kept.
    None of a worker with one device, and of a job without a deadline."""

    def ready_after(self, ms: float) -> PlacementEstimate:
        """The same where the rows can begin only so long from now: only what waiting for a place does not hide counts.

        Others go on meanwhile, since a row that is not ready leaves its place in the step to them.
        """
        exposed_ms = max(0.0, ms - self.begin_ms)
        return self._replace(finish_ms=self.finish_ms + exposed_ms) if exposed_ms else self

    def adapted_after(self, wait_ms: float, needing_ms: float) -> PlacementEstimate:
        """The same where adapters are there only after `wait_ms`, and the rows' own steps that need them take so long.

        A row that waits for adapters is beside the batch: it costs others nothing, and then makes its steps. So it ends
        when its virtual run does, or its wait and those steps, whichever is later.
        """
        least_ms = wait_ms + needing_ms if wait_ms else 0.0
        return self._replace(finish_ms=least_ms) if least_ms > self.finish_ms else self


class FinishEstimator:
    """A backlog, prepared to be asked what becomes of it with more rows.

    Where all rows share a step, no row waits for another, and a row of r steps ends after r * base_ms plus, for every
    other row i, step_ms[i] * min(r, steps[i]): two look-ups in running sums by steps. Otherwise a virtual run tells.
    """

    def __init__(self, backlog: WorkerLoad) -> None:
        self.backlog = backlog
        rows = sorted(backlog.running, key=lambda row: row.steps)
        self._steps = [row.steps for row in rows]
        self._step_ms = _sums(row.step_ms for row in rows)
        self._own_ms = _sums(row.step_ms * row.steps for row in rows)
        self._row_steps = _sums(self._steps)
        self._first_ms = sum(row.first_ms for row in rows)
        self._room = backlog.tokens - sum(row.tokens for row in rows)

    @cached_property
    def ends_ms(self) -> list[float]:
        """See :meth:`WorkerLoad.ends_ms`."""
        return self.backlog.ends_ms()

    @property
    def drained_ms(self) -> float:
        """Time until all rows have left."""
        if self.backlog.waiting:
            return max(self.ends_ms)
        most = self._steps[-1] if self._steps else 0
        return self._first_ms + most * self.backlog.base_ms + self._own_ms[-1]

    def predict(self, rows: Sequence[RowLoad]) -> PlacementEstimate:
        """What happens if `rows`, at least one, join last."""
        backlog, first = self.backlog, rows[0]
        steps, count = first.steps, len(rows)
        if backlog.waiting or len(self._steps) + count > backlog.places:
            return self._run(rows)
        if count * first.tokens + first.first_tokens > self._room:
            return self._run(rows)
        if count > 1 and any(row != first for row in rows):
            return self._run(rows)
        done = bisect_right(self._steps, steps)
        others_ms = self._own_ms[done] + steps * (self._step_ms[-1] - self._step_ms[done])
        shared_steps = self._row_steps[done] + steps * (len(self._steps) - done)
        finish_ms = self._first_ms + steps * backlog.base_ms + others_ms + count * first.work_ms
        delay_ms = count * (first.step_ms * shared_steps + first.first_ms * len(self._steps))
        return PlacementEstimate(finish_ms, delay_ms)

    def _run(self, rows: Sequence[RowLoad]) -> PlacementEstimate:
        begins, ends = replace(self.backlog, waiting=(*self.backlog.waiting, *rows)).times_ms()
        delay_ms = max(0.0, sum(ends[: -len(rows)]) - sum(self.ends_ms))
        return PlacementEstimate(max(ends[-len(rows) :]), delay_ms, begins[-len(rows)])


def _sums(values: Iterable[float]) -> list[float]:
    """Running sums, from 0."""
    return [0.0, *accumulate(values)]


class WorkerEstimate(NamedTuple):
    """One worker, or several alike."""

    drained_ms: float
    """Time until all its rows are computed."""
    row_ms: float
    """Time that a row takes there."""
    workers: float = 1.0
    """How many it stands for."""


class JobFinishEstimate(NamedTuple):
    """When a job is computed."""

    finish_ms: float
    """Time from now, after all that comes before it."""
    alone_ms: float
    """Time if nothing came before it."""


def computed(prospects: Sequence[WorkerEstimate], ahead: float, rows: float) -> JobFinishEstimate | None:
    """When a job's rows are computed, each by any worker; None where no worker serves it or its cost is unknown.

    `prospects` are the workers that serve it, `ahead` is how much comes before it, in rows like its own.
    """
    if not prospects or any(worker.row_ms <= 0 for worker in prospects):
        return None
    # idle workers end together: no level has to be found
    fastest_ms = min(worker.row_ms for worker in prospects)
    alone_ms = max(fastest_ms, rows / sum(worker.workers / worker.row_ms for worker in prospects))
    return JobFinishEstimate(_level_ms(prospects, ahead + rows, fastest_ms), alone_ms)


def _level_ms(prospects: Sequence[WorkerEstimate], rows: float, fastest_ms: float) -> float:
    """The time at which all workers end together if they compute so many more rows."""
    workers = sorted(prospects)
    level_ms, rate, left = workers[0].drained_ms, 0.0, rows
    for index, worker in enumerate(workers):
        rate += worker.workers / worker.row_ms
        following = workers[index + 1].drained_ms if index + 1 < len(workers) else float("inf")
        room = (following - level_ms) * rate
        if room >= left:
            return max(fastest_ms, level_ms + left / rate)
        level_ms, left = following, left - room
    raise AssertionError("after the last worker there is room for everything")
