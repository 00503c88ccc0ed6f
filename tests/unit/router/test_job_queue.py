"""The work queue's books, without a server: a cancel that overtakes its job."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from nats.aio.msg import Msg

from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import FairQueue
from giornata.wire.messages import CancelRows, Epoch, SubmitRequest
from giornata_router import job_queue as module
from giornata_router.admission import FinishTimeEstimator
from giornata_router.config import RouterConfig
from giornata_router.job_queue import LeaderJobQueue
from giornata_router.job_records import RouterContext
from giornata_router.job_runner import HeldJob
from tests.contract.messages import JOB


class Server:
    """JetStream and the records, which a test lets something happen in before they answer."""

    def __init__(self) -> None:
        self.queue: LeaderJobQueue
        self.cancels = False

    async def publish(self, subject: str, data: bytes, headers: object) -> Any:
        if self.cancels:
            self.queue.cancel(CancelRows(job_id=JOB.job_id, attempt=0))
        metadata = SimpleNamespace(sequence=SimpleNamespace(stream=1))
        await self.queue._take(cast("Msg", SimpleNamespace(data=data, reply="r", metadata=metadata)))
        return SimpleNamespace(duplicate=False)

    async def create(self, record: object) -> int:
        return 1


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_job_that_is_cancelled_before_it_is_delivered_ends_without_waiting_for_its_turn(
    monkeypatch: pytest.MonkeyPatch, cancels: bool
) -> None:
    ended: list[tuple[str, bool]] = []

    async def carry(_: RouterContext, held: HeldJob) -> bool:
        ended.append((held.job.job_id, held.cancelled))
        return True

    monkeypatch.setattr(module, "carry", carry)
    server, placement = Server(), Placement()
    tools = SimpleNamespace(
        config=RouterConfig(instance="r"),
        bus=SimpleNamespace(client=None, jetstream=server),
        records=server,
        dispatch=SimpleNamespace(placement=placement),
        forecasting=FinishTimeEstimator(placement, FairQueue()),
        room=SimpleNamespace(take=lambda: None),
    )
    async with asyncio.TaskGroup() as walks:
        queue = server.queue = LeaderJobQueue(cast("RouterContext", tools), walks, Epoch(1, 1))
        server.cancels = cancels
        await queue.submit(SubmitRequest(job=JOB, remaining_ms=1000))
    assert ended == ([(JOB.job_id, True)] if cancels else [])
    assert (len(queue._held), len(queue._waiting)) == ((0, 0) if cancels else (1, 1))
    assert queue._places.full is False
