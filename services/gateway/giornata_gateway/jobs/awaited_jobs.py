"""The jobs that a door's requests wait for here, by tenant: what an API tells of them that names no jobs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from giornata.wire.events import StepEvent
from giornata_gateway.jobs.submission import AwaitedJob


class AwaitedJobs:
    """Jobs of each tenant while requests at this gateway wait for them, and how far each picture is."""

    def __init__(self) -> None:
        self._steps: defaultdict[str, dict[str, dict[int, int]]] = defaultdict(dict)

    @contextmanager
    def held(self, awaited: AwaitedJob) -> Iterator[None]:
        """Count the job as its tenant's while inside; its steps are known where the request listens to them."""
        job, steps = awaited.job, dict[int, int]()

        def hear(event: StepEvent) -> None:
            steps[event.index] = event.step

        if awaited.steps is not None:
            awaited.steps.told(hear)
        own = self._steps[job.tenant]
        own[job.job_id] = steps
        try:
            yield
        finally:
            del own[job.job_id]
            if not own:
                del self._steps[job.tenant]

    def of(self, tenant: str) -> dict[str, dict[int, int]]:
        """Steps computed of each picture by its index, by job; the tenant's oldest job comes first."""
        return dict(self._steps.get(tenant, {}))
