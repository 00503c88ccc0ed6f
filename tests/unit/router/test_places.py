"""How many jobs may be accepted, and what is said of a limit."""

from __future__ import annotations

import pytest

from giornata.scheduling.job_queue import QueuedJob
from giornata.wire.errors import BatchQueueFull, InteractiveQueueFull, QueueFull, TenantQueueFull
from giornata.wire.jobs import Priority
from giornata_router.admission import QueueLimiter


def job(tenant: str = "a", priority: Priority = Priority.INTERACTIVE) -> QueuedJob:
    return QueuedJob("j", priority, tenant, 1.0, "digest", 1, 10, 0.0, 60.0)


def places(share: float = 0.5) -> QueueLimiter:
    return QueueLimiter({Priority.INTERACTIVE: 4, Priority.BATCH: 8}, share)


@pytest.mark.parametrize(
    ("priority", "limit", "error"),
    [(Priority.INTERACTIVE, 4, InteractiveQueueFull), (Priority.BATCH, 8, BatchQueueFull)],
)
def test_each_priority_has_a_limit_of_its_own(priority: Priority, limit: int, error: type[QueueFull]) -> None:
    made = places(share=1.0)
    [other] = set(Priority) - {priority}
    for _ in range(limit):
        assert not made.full
        made.check(job("a", priority))
        made.take(job("a", priority))
    assert made.full
    with pytest.raises(error) as refused:
        made.check(job("b", priority))
    assert (refused.value.status, refused.value.accepted) == (429, f"at most {limit}")
    assert refused.value.retry_after_s
    made.check(job("b", other))
    made.give_back(job("a", priority))
    made.check(job("b", priority))


def test_one_tenant_never_fills_the_queue_for_others() -> None:
    made = places()
    for _ in range(2):
        made.check(job("a"))
        made.take(job("a"))
    with pytest.raises(TenantQueueFull) as refused:
        made.check(job("a"))
    assert (refused.value.status, refused.value.code) == (429, "tenant_queue_full")
    assert refused.value.accepted == "at most 2 of 4"
    made.check(job("a", Priority.BATCH))
    made.check(job("b"))
    made.give_back(job("a"))
    made.check(job("a"))


def test_however_small_its_share_a_tenant_has_one_place() -> None:
    made = places(share=0.01)
    made.check(job())
    made.take(job())
    with pytest.raises(TenantQueueFull):
        made.check(job())
