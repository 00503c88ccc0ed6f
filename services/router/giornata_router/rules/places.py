"""How many jobs may be accepted and unfinished: by priority, and by tenant. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Final

from giornata.scheduling.waiting import QueuedJob
from giornata.wire.errors import BatchQueueFull, InteractiveQueueFull, QueueFull, TenantQueueFull
from giornata.wire.jobs import Priority

RETRY_AFTER_S: Final = 5.0
_FULL: Final[Mapping[Priority, type[QueueFull]]] = {
    Priority.INTERACTIVE: InteractiveQueueFull,
    Priority.BATCH: BatchQueueFull,
}


class QueueLimiter:
    """Counts jobs against `limits`; one tenant may take `tenant_share` of each limit, and at least one place."""

    def __init__(self, limits: Mapping[Priority, int], tenant_share: float) -> None:
        self._limits = limits
        self._tenant_limits = {p: max(1, int(limit * tenant_share)) for p, limit in limits.items()}
        self._jobs: Counter[Priority] = Counter()
        self._tenants: Counter[tuple[str, Priority]] = Counter()

    @property
    def full(self) -> bool:
        """Whether a priority has no place left."""
        return any(self._jobs[priority] >= limit for priority, limit in self._limits.items())

    def check(self, job: QueuedJob) -> None:
        """Return if there is a place for `job`.

        Raises:
            InteractiveQueueFull, BatchQueueFull: its priority has none.
            TenantQueueFull: its tenant has as many as it may.
        """
        limit, own = self._limits[job.priority], self._tenant_limits[job.priority]
        if self._jobs[job.priority] >= limit:
            raise _FULL[job.priority](
                received=f"{self._jobs[job.priority]} unfinished {job.priority} jobs",
                accepted=f"at most {limit}",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._tenants[job.flow] >= own:
            raise TenantQueueFull(
                received=f"{self._tenants[job.flow]} unfinished {job.priority} jobs of this tenant",
                accepted=f"at most {own} of {limit}",
                retry_after_s=RETRY_AFTER_S,
            )

    def take(self, job: QueuedJob) -> None:
        """Count an accepted job."""
        self._jobs[job.priority] += 1
        self._tenants[job.flow] += 1

    def give_back(self, job: QueuedJob) -> None:
        """The job has ended."""
        self._jobs[job.priority] -= 1
        self._tenants[job.flow] -= 1
        if not self._tenants[job.flow]:
            del self._tenants[job.flow]
