"""ROCK's scheduler: queues of alike jobs are matched with workers (CLUSTER '25, section 4.1). Pure.

The paper matches each queue with one worker for 90 s, which carries no load: here queues are matched anew at each free
place. The heaviest pair of a queue and a free worker is served, but a queue whose first job has waited for a minute
comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.kinds_line import JobKindQueue
from giornata.scheduling.line import Key, QueuedRows, RowQueue
from giornata.scheduling.matching import FreeWorker, affinity, chosen, weights
from giornata.scheduling.placement import Placement
from giornata.scheduling.scheduler import LOOKED_AT, RowAssignment, SchedulingDecision, room_for_any

OLD_S: Final = 60.0
"""A queue whose first job has waited for so long comes first."""
ASKED: Final = 32
"""Waiting jobs of a queue whose adapters are its affinity."""


@dataclass(frozen=True)
class RockScheduler:
    """Serves the heaviest pair of queue and free worker. `queues`: by kind, where the line knows kinds; else one."""

    looked_at: int = LOOKED_AT
    queues: bool = True

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`giornata.scheduling.scheduler.Scheduler`."""
        if not room_for_any(line, placement):
            return SchedulingDecision()
        with placement.trial() as count:
            if self.queues and isinstance(line, JobKindQueue):
                queues = line.queues(now)
            else:
                queues = {0: waiting} if (waiting := line.order(now)) else {}
            made = _RockDecisionBuilder(self, placement, count, now, queues, line)
            while made.serve_one():
                pass
        return SchedulingDecision(made.placements, wake_at=line.changes_at(now) if made.queues else None)


@dataclass
class _QueueMatch:
    """A queue's first rows, and the workers that have a place for them."""

    queue: int
    entry: QueuedRows
    asked: JobDemand
    workers: list[FreeWorker]


@dataclass
class _RockDecisionBuilder:
    """A decision in the making."""

    rules: RockScheduler
    placement: Placement
    count: Callable[[str, str, JobDemand], None]
    now: float
    queues: dict[int, list[QueuedRows]]
    """Entries that wait, by queue; a queue without any is left out."""
    line: RowQueue
    placed: dict[tuple[Key, str], list[int]] = field(default_factory=dict)
    """Rows by entry and worker."""
    kept: dict[str, Key] = field(default_factory=dict)
    """Workers that are kept free, each for an old entry that no worker has room for."""

    @property
    def placements(self) -> tuple[RowAssignment, ...]:
        """What one worker gets of an entry together, in the order of the first rows."""
        return tuple(RowAssignment(key, worker, tuple(rows)) for (key, worker), rows in self.placed.items())

    def serve_one(self) -> bool:
        """Place the first rows of one queue; False where none can be."""
        yields = min((self._yields(entries[0]) for entries in self.queues.values()), default=True)
        pairs = [
            pair
            for queue, entries in self.queues.items()
            if self._yields(entries[0]) == yields and (pair := self._pair(queue, entries[0])) is not None
        ]
        if not pairs:
            return self._let_batch_come(yields=yields)
        old = [pair for pair in pairs if self.now - pair.entry.since_s > OLD_S]
        first = min(old, key=lambda pair: pair.entry.key[1]) if old else max(pairs, key=_heaviest)
        worker = chosen(first.workers)
        if worker is None:
            raise RuntimeError(f"queue {first.queue} was matched without a worker")
        self._place(first, worker.name)
        return True

    def _yields(self, entry: QueuedRows) -> bool:
        return isinstance(self.line, JobKindQueue) and self.line.yields(entry, self.now)

    def _let_batch_come(self, *, yields: bool) -> bool:
        """No interactive queue can be served: drop them from this decision, so that batch jobs are asked."""
        before = len(self.queues)
        self.queues = {q: entries for q, entries in self.queues.items() if self._yields(entries[0]) != yields}
        return bool(self.queues) and len(self.queues) < before and not yields

    def _pair(self, queue: int, entry: QueuedRows) -> _QueueMatch | None:
        asked = entry.asked(self.now).piece()
        closed = [name for name, key in self.kept.items() if key != entry.key]
        known = self.placement.candidates(asked, self.rules.looked_at, closed)
        able = [c for c in known if asked.fits(c.rows, c.capacity_rows)]
        if not able:
            if self.now - entry.since_s > OLD_S and entry.key not in self.kept.values():
                soonest = self.placement.soonest(asked, closed)
                self.kept |= {} if soonest is None else {soonest: entry.key}
            return None
        wanted = {lora.digest for one in self.queues[queue][:ASKED] for lora in one.demand.adapters}
        workers = [
            FreeWorker(
                c.instance,
                affinity(wanted, self.placement.adapters(c.instance)),
                c.rows / c.capacity_rows,
                c.prediction().finish_ms,
            )
            for c in able
        ]
        return _QueueMatch(queue, entry, asked, workers)

    def _place(self, pair: _QueueMatch, worker: str) -> None:
        entry, entries = pair.entry, self.queues[pair.queue]
        rows = entry.rows[: pair.asked.rows]
        self.count(entry.job_id, worker, pair.asked)
        self.placed.setdefault((entry.key, worker), []).extend(rows)
        if len(rows) < len(entry.rows):
            entries[0] = entry.without(rows)
            return
        del entries[0]
        if not entries:
            del self.queues[pair.queue]


def _heaviest(pair: _QueueMatch) -> tuple[float, int]:
    """Weight of the queue with its best worker; of equal ones the older job's."""
    return max(weights(pair.workers).values()), -pair.entry.key[1]
