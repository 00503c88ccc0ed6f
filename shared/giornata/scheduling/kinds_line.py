"""A line in which queues of alike jobs take turns by the work that each was served (ROCK, section 4.1). Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Final

from giornata.scheduling.demand import JobDemand
from giornata.scheduling.kinds import Features, JobKindModel, RecentJobs, features_of
from giornata.scheduling.line import AGEING_S, Key, QueuedRows
from giornata.scheduling.queued_rows import RowQueueBase
from giornata.wire.jobs import Priority

CREDIT_S: Final = 60.0
"""A queue that was empty has at most so much less work served than the others: it does not hold them up for long."""


class JobKindQueue(RowQueueBase):
    """See :class:`giornata.scheduling.line.RowQueue`.

    Jobs are of one kind until a model is given; then each queue has its jobs in the order of their arrival. Batch jobs
    come after interactive ones until they have waited for a while. Tenants and deadlines do not count, as in ROCK.
    """

    def __init__(self, *, ageing_s: float = AGEING_S) -> None:
        super().__init__()
        self._ageing_s = ageing_s
        self._seen = RecentJobs()
        self._features: dict[Key, Features] = {}
        self._queues: dict[Key, int] = {}
        self._sizes: Counter[int] = Counter()
        """Entries, by queue that has any."""
        self._work_s: defaultdict[int, float] = defaultdict(float)
        """Served, by queue."""

    def to_fit(self, now: float) -> tuple[Features, ...] | None:
        """The jobs that a model should be fitted to now; None where it need not."""
        return self._seen.to_fit(now)

    def use(self, model: JobKindModel) -> None:
        """Sort jobs by `model` from now on, those that wait too; work that was served is forgotten."""
        self._seen.model = model
        self._queues = {key: model.kind(features) for key, features in self._features.items()}
        self._sizes = Counter(self._queues.values())
        self._work_s.clear()

    def queue_of(self, key: Key) -> int:
        """The queue of an entry."""
        return self._queues[key]

    def queues(self, now: float) -> dict[int, list[QueuedRows]]:
        """Entries by queue, each in the order of its turns."""
        found = defaultdict[int, list[QueuedRows]](list)
        for entry in sorted(self, key=lambda entry: (self.yields(entry, now), entry.key[1])):
            found[self._queues[entry.key]].append(entry)
        return dict(found)

    def order(self, now: float) -> list[QueuedRows]:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        queues = self.queues(now)
        work_s = {queue: self._work_s[queue] for queue in queues}
        ordered, places = list[QueuedRows](), dict.fromkeys(queues, 0)
        while len(ordered) < len(self):
            waiting = (queue for queue in queues if places[queue] < len(queues[queue]))
            queue = min(
                waiting, key=lambda one: (self.yields(queues[one][places[one]], now), work_s[one], one)
            )
            entry = queues[queue][places[queue]]
            places[queue] += 1
            work_s[queue] += _work_s(entry.takes_s, entry.demand.steps)
            ordered.append(entry)
        return ordered

    def changes_at(self, now: float) -> float | None:
        """See :class:`giornata.scheduling.line.RowQueue`."""
        batch = (entry for entry in self if entry.claim.priority is Priority.BATCH)
        return min((at_s for entry in batch if (at_s := entry.since_s + self._ageing_s) > now), default=None)

    def yields(self, entry: QueuedRows, now: float) -> bool:
        """Whether it comes after all interactive jobs: it is a batch job that has not aged."""
        return entry.claim.priority is Priority.BATCH and now - entry.since_s < self._ageing_s

    def _joined(self, entry: QueuedRows, now: float) -> None:
        features = self._features[entry.key] = features_of(entry.demand, entry.claim, now)
        self._seen.see(features)
        queue = self._queues[entry.key] = self._seen.kind(features)
        if self._sizes and not self._sizes[queue]:
            most_s = max(self._work_s[other] for other, size in self._sizes.items() if size)
            self._work_s[queue] = max(self._work_s[queue], most_s - CREDIT_S)
        self._sizes[queue] += 1

    def _served(self, entry: QueuedRows, served: JobDemand, now: float, *, whole: bool) -> None:  # noqa: ARG002
        takes_s = entry.claim.takes_s * served.rows
        self._work_s[self._queues[entry.key]] += _work_s(takes_s, served.steps)

    def _left(self, entry: QueuedRows) -> None:
        del self._features[entry.key]
        self._sizes[self._queues.pop(entry.key)] -= 1
        self._sizes += Counter()  # drops zeros


def _work_s(takes_s: float, steps: int) -> float:
    """Time of work; where no speed is known, a step counts as a tenth of a second."""
    return takes_s or steps / 10
