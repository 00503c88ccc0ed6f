"""How good any schedule could be: a clairvoyant relaxation. Pure.

The bound is the least x such that a share of all jobs (95 %) can end within x of their arrival. Everything that makes
scheduling hard is relaxed: all workers are pooled into one machine that serves one job after the other at their summed
speed, knows what will arrive, may leave any job undone, and may interrupt (which it never needs to).

A job costs the pool as follows, for a given x. A step of k rows takes a base time and what each of its rows adds; a
row that adds r to a step of length D is charged its share, r * D / (D - base). The steps of a row that is on time are
at most x long together, and so by Cauchy and Schwarz the charges sum to at least
sum(r) + base * sum(sqrt(r))² / (x - steps * base): a fast row pays for steps that few share. Since no more than
`places` rows share a step, no row is charged less than r + base * r / (places * the largest r).

With deadlines in the order of arrivals the most jobs on time follow from the rule of Kise, Ibaraki and Mine
(Operations Research 26, 1978), which is Moore's and Hodgson's with release times: jobs join in order; when the last
one is late, the job leaves whose absence lets the others end soonest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from statistics import fmean

from giornata.scheduling.demand import RowShape
from giornata_lab.simulation.jobs import SimulatedJob
from giornata_lab.simulation.machines import Machine

PRECISION_S = 0.005


@dataclass(frozen=True)
class PooledTask:
    """A job that takes `seconds` of the pooled machine."""

    released_s: float
    due_s: float
    seconds: float


def most_on_time(tasks: Sequence[PooledTask]) -> int:
    """Return how many can end in time on one machine, no two of them at once.

    Raises:
        ValueError: their order is not that of their releases and of their deadlines alike.
    """
    for before, after in pairwise(tasks):
        if after.released_s < before.released_s or after.due_s < before.due_s:
            raise ValueError("tasks are ordered by release and by deadline alike; received one that is not")
    kept = _OnTimeTasks()
    for task in tasks:
        kept.append(task)
        if kept.ends_s > task.due_s:
            kept.drop()
    return len(kept)


class _OnTimeTasks:
    """Tasks that are on time, in order; tasks that ended before the machine last idled are only counted."""

    def __init__(self) -> None:
        self._settled = 0
        self._settled_s = 0.0
        """When the last counted task ends."""
        self._tasks: list[PooledTask] = []
        """Tasks without a pause between them."""
        self._starts: list[float] = []
        self.ends_s = 0.0

    def __len__(self) -> int:
        return self._settled + len(self._tasks)

    def append(self, task: PooledTask) -> None:
        if task.released_s >= self.ends_s:
            self._settled, self._settled_s = len(self), self.ends_s
            self._tasks, self._starts = [], []
        start = max(task.released_s, self.ends_s)
        self._tasks.append(task)
        self._starts.append(start)
        self.ends_s = start + task.seconds

    def drop(self) -> None:
        """Drop the task without which the others end soonest."""
        last = len(self._tasks) - 1
        before = self._starts[last - 1] + self._tasks[last - 1].seconds if last else self._settled_s
        best, gain, room = last, self.ends_s - before, math.inf
        for place in reversed(range(last)):
            room = min(room, self._starts[place + 1] - self._tasks[place + 1].released_s)
            gained = min(self._tasks[place].seconds, room)
            if gained > gain:
                best, gain = place, gained
        left = self._tasks[:best] + self._tasks[best + 1 :]
        self._tasks, self._starts, self.ends_s = [], [], self._settled_s
        for task in left:
            self.append(task)


@dataclass(frozen=True)
class _BoundJob:
    """A job as a bound needs it, on the machine on which it costs least."""

    at_s: float
    shortest_s: float
    """Each row alone on the fastest worker, stages included."""
    released_s: float
    """When it may be denoised."""
    rows: tuple[tuple[int, float, float], ...]
    """For each row: its steps, the seconds that they add, and the sum of the roots of these."""

    @property
    def work_s(self) -> float:
        """Seconds that its rows add to steps."""
        return sum(adds_s for _, adds_s, _ in self.rows)


class LatencyBound:
    """Lower bounds on a percentile of the latencies of `jobs`, and on their mean.

    Jobs come in the order of their arrival. Where machines differ, each counts by the most that it is faster than the
    first. `encode_s` pass before denoising, `finish_s` after it, for one picture at least.
    """

    def __init__(
        self, jobs: Sequence[SimulatedJob], machines: Sequence[Machine], encode_s: float, finish_s: float
    ) -> None:
        first = machines[0]
        shapes = {shape for job in jobs for shape in job.demand.shapes}
        kinds = {(m.costs, m.operations, m.slowness, m.rows): m for m in machines}
        faster = {key: _faster(first, machine, shapes) for key, machine in kinds.items()}
        self._speed = sum(faster[m.costs, m.operations, m.slowness, m.rows] for m in machines)
        self._fastest = max(faster.values())
        self._base_s = min(m.pace.base_ms * faster[key] for key, m in kinds.items()) / 1e3
        self._places = max(m.rows for m in machines)
        self._finish_s = finish_s
        self._jobs = [_kind(job, list(kinds.values()), encode_s, finish_s) for job in jobs]
        loads = [shape.load(first.pace, reuses=True) for shape in shapes]
        self._largest_s = max((load.step_ms + load.first_ms for load in loads), default=0.0) / 1e3

    def percentile(self, percent: float, *, warmup_s: float = 0.0) -> float:
        """Seconds within which no schedule can end more than `percent` of all jobs that arrive after the warm-up."""
        counted = [job for job in self._jobs if job.at_s >= warmup_s]
        needed = math.floor(percent / 100 * (len(counted) - 1)) + 1 if counted else 0
        low, high = 0.0, max((job.shortest_s for job in counted), default=0.0)
        while self._on_time(counted, high) < needed:
            low, high = high, 2 * high
        parts = range(1, math.ceil((high - low) / PRECISION_S))
        short = bisect_left(parts, needed, key=lambda part: self._on_time(counted, low + part * PRECISION_S))
        return low + short * PRECISION_S

    def mean(self, *, warmup_s: float = 0.0) -> float:
        """Seconds: no schedule has a smaller mean than all rows alone on the fastest worker."""
        shortest = [job.shortest_s for job in self._jobs if job.at_s >= warmup_s]
        return sum(shortest) / max(1, len(shortest))

    def in_order(self, *, warmup_s: float = 0.0) -> list[float]:
        """Latencies if workers computed as fast as the rows in the system allow, and all of it for the oldest job.

        Not a bound, but what is left once no job is passed over, no worker is worse filled than another, and nothing
        is spent on a younger row: rows that share steps share time.
        """
        waiting, now_s, left_s, found = deque[_BoundJob](), 0.0, 0.0, list[float]()
        for job in (*self._jobs, None):
            until_s = math.inf if job is None else job.released_s
            while waiting:
                rate = self._rate(row for one in waiting for row in one.rows)
                if now_s + left_s / rate > until_s:
                    left_s -= (until_s - now_s) * rate
                    break
                now_s, done = now_s + left_s / rate, waiting.popleft()
                if done.at_s >= warmup_s:
                    found.append(max(now_s + self._finish_s - done.at_s, done.shortest_s))
                left_s = waiting[0].work_s if waiting else 0.0
            if job is not None:
                now_s, left_s = until_s, left_s if waiting else job.work_s
                waiting.append(job)
        return found

    def _rate(self, rows: Iterable[tuple[int, float, float]]) -> float:
        """Seconds of what rows add to steps that all workers compute a second; the oldest have places."""
        sharing = list(islice(rows, round(self._places * self._speed)))
        adds_s = max(1.0, len(sharing) / self._speed) * fmean(adds_s / steps for steps, adds_s, _ in sharing)
        return min(self._speed, len(sharing)) * adds_s / (self._base_s + adds_s)

    def _on_time(self, jobs: Sequence[_BoundJob], x_s: float) -> int:
        tasks = [
            PooledTask(
                job.released_s, job.at_s + x_s - self._finish_s, self._charge_s(job, x_s) / self._speed
            )
            for job in jobs
            if job.shortest_s <= x_s
        ]
        return most_on_time(tasks)

    def _charge_s(self, job: _BoundJob, x_s: float) -> float:
        charged = 0.0
        denoising_s = (x_s - (job.released_s - job.at_s) - self._finish_s) * self._fastest
        for steps, adds_s, roots in job.rows:
            free_s = denoising_s - steps * self._base_s
            fast = self._base_s * roots * roots / free_s if free_s > 0 else math.inf
            shared = self._base_s * adds_s / (self._places * self._largest_s) if self._largest_s else 0.0
            charged += adds_s + max(min(fast, steps * self._base_s), shared)
        return charged


def _faster(first: Machine, machine: Machine, shapes: Collection[RowShape]) -> float:
    """The most by which `machine` is faster than `first`, over the steps of all rows."""
    ratios = [1.0] if machine == first else []
    for shape in shapes if not ratios else ():
        there, here = (shape.load(m.pace, reuses=True) for m in (first, machine))
        ratios += [there.step_ms / here.step_ms, there.work_ms / here.work_ms]
        ratios.append(first.pace.base_ms / machine.pace.base_ms if machine.pace.base_ms else 1.0)
    return max(ratios, default=1.0)


def _kind(job: SimulatedJob, kinds: Sequence[Machine], encode_s: float, finish_s: float) -> _BoundJob:
    rows = []
    for shape in job.demand.shapes:
        load = shape.load(kinds[0].pace, reuses=True)
        begin_s, step_s = (load.step_ms + load.first_ms) / 1e3, load.step_ms / 1e3
        roots = math.sqrt(begin_s) + (load.steps - 1) * math.sqrt(step_s)
        rows.append((load.steps, load.work_ms / 1e3, roots))
    shortest_s = encode_s + min(_alone_ms(job, machine) for machine in kinds) / 1e3 + finish_s
    return _BoundJob(job.at_s, shortest_s, job.at_s + encode_s, tuple(rows))


def _alone_ms(job: SimulatedJob, machine: Machine) -> float:
    """Time of the job with each row on a machine of its own."""
    loads = job.demand.loads(machine.pace, reuses=True)
    return max(load.steps * machine.pace.base_ms + load.work_ms for load in loads)
