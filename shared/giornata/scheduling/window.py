"""How many jobs are carried at a time: as many as the fleet can compute, and as many again on their way. Pure."""

from __future__ import annotations

from giornata.scheduling.waiting import NextJob, QueuedJob
from giornata.wire.jobs import Priority


class InFlightJobWindow:
    """Rows of carried jobs, from the beginning of their inspection to their end.

    Twice what ready workers hold at once: while a worker computes its rows, as many others are inspected, encoded or
    decoded. With few workers or none, `prepared_rows` are prepared ahead of them all the same.

    Tenants share it. A batch job that yields is carried only while there is room beside all others; interactive ones do
    not wait for it.
    """

    def __init__(self, prepared_rows: int) -> None:
        self._prepared_rows = prepared_rows
        self._capacity_rows = 0
        self._jobs: dict[str, tuple[QueuedJob, bool]] = {}
        """Each job, and whether it yields."""
        self._used = {False: 0, True: 0}

    @property
    def rows(self) -> int:
        """Rows that may be carried; the last job may have more."""
        return self._capacity_rows + max(self._prepared_rows, self._capacity_rows)

    def resize(self, capacity_rows: int) -> None:
        """Follow the fleet: ready workers hold so many rows at once."""
        self._capacity_rows = capacity_rows

    def has_room(self, turn: NextJob) -> bool:
        """Whether the job may be carried now."""
        used = self._used[False] + (self._used[True] if turn.yields else 0)
        return used < self.rows or self.within_share(turn.job)

    def begin(self, turn: NextJob) -> None:
        """The job is carried from now on."""
        self._jobs[turn.job.job_id] = turn.job, turn.yields
        self._used[turn.yields] += turn.job.rows

    def end(self, job: QueuedJob) -> None:
        """The job is not carried any more, if it was."""
        if job.job_id in self._jobs:
            begun, yields = self._jobs.pop(job.job_id)
            self._used[yields] -= begun.rows

    def within_share(self, job: QueuedJob) -> bool:
        """Whether a tenant beside others has less than its share of the carried rows: its jobs exceed a full window.

        A batch job's do not where interactive ones fill it.
        """
        if job.priority is Priority.BATCH and self._used[False] >= self.rows:
            return False
        jobs = [job, *(carried for carried, _ in self._jobs.values())]
        weights = {one.tenant: one.weight for one in jobs}
        own = sum(one.rows for one in jobs if one.tenant == job.tenant)
        return len(weights) > 1 and own <= self.rows * job.weight / sum(weights.values())
