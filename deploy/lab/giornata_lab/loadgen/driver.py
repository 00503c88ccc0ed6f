"""Open loop: a request leaves when it is due, answered or not the ones before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from giornata_lab.loadgen.outcomes import NOT_SENT, RequestOutcome, ServerAnswer
from giornata_lab.loadgen.workload import WorkloadRequest

Send = Callable[[WorkloadRequest], Awaitable[ServerAnswer]]
"""Sends a request and waits for its answer; raises nothing but a cancellation."""
Record = Callable[[RequestOutcome], object]
"""Takes what became of a request."""


async def drive(requests: Sequence[WorkloadRequest], send: Send, record: Record, *, limit: int) -> None:
    """Send every request when it is due, in the order of their times; return when the last one has its answer.

    Outcomes are recorded in the order in which requests end. A request that is due while `limit` others have no answer
    is not sent, and recorded as an error. When cancelled, requests without an answer are given up and not recorded.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    in_flight = 0

    async def sent(request: WorkloadRequest, others: int) -> None:
        nonlocal in_flight
        sent_s = loop.time() - began
        try:
            answer = await send(request)
        finally:
            in_flight -= 1
        record(RequestOutcome(request, loop.time() - began, answer, sent_s, others))

    async with asyncio.TaskGroup() as group:
        for request in requests:
            await asyncio.sleep(max(0.0, began + request.at_s - loop.time()))
            if in_flight >= limit:
                refused = ServerAnswer(code=NOT_SENT, message=f"{limit} requests had no answer yet")
                record(RequestOutcome(request, request.at_s, refused, in_flight=in_flight))
                continue
            in_flight += 1
            group.create_task(sent(request, in_flight))
