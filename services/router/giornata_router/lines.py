"""The line that the configuration names, and its kinds, which are fitted beside the event loop."""

from __future__ import annotations

import asyncio
import time

import structlog

from giornata.scheduling.fair_line import FairQueue
from giornata.scheduling.kinds import PAUSE_S
from giornata.scheduling.kinds_line import JobKindQueue
from giornata.scheduling.line import QueueOrder, RowQueue
from giornata.scheduling.policies import PolicyName
from giornata_router.config import RouterConfig

log = structlog.get_logger(__name__)


def line_of(config: RouterConfig) -> RowQueue:
    """A line without jobs."""
    if config.line_name is QueueOrder.KINDS:
        return JobKindQueue(ageing_s=config.ageing_s)
    return FairQueue(by_deadline=config.policy is PolicyName.DEADLINE_AWARE, ageing_s=config.ageing_s)


async def keep_fitted(line: JobKindQueue, pause_s: float = PAUSE_S) -> None:
    """Look every `pause_s` whether jobs have changed, and sort them by a model of theirs; until it is cancelled."""
    from giornata.scheduling.kinds_fit import fit  # noqa: PLC0415 - takes seconds, and needs the extra `rock`

    while True:
        await asyncio.sleep(pause_s)
        jobs = line.to_fit(time.monotonic())
        if jobs is not None:
            model = await asyncio.to_thread(fit, jobs)
            line.use(model)
            log.info("kinds_fitted", jobs=len(jobs), kinds=model.components)
