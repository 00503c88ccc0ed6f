"""The jobs that a door's requests wait for here, by tenant: what an API tells of them that names no jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from giornata.wire.jobs import Job


class InProgress:
    """Jobs of each tenant while requests at this gateway wait for them."""

    def __init__(self) -> None:
        self._jobs: defaultdict[str, dict[str, Job]] = defaultdict(dict)

    @contextmanager
    def held(self, job: Job) -> Iterator[None]:
        """Count `job` as its tenant's while inside."""
        own = self._jobs[job.tenant]
        own[job.job_id] = job
        try:
            yield
        finally:
            del own[job.job_id]
            if not own:
                del self._jobs[job.tenant]

    def of(self, tenant: str) -> tuple[Job, ...]:
        """A tenant's jobs, the oldest first."""
        return tuple(self._jobs[tenant].values()) if tenant in self._jobs else ()
