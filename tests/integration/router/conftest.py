"""A bench with servers of its own, and what a test opens beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.records import JobRecordStore
from giornata.wire import subjects
from giornata.wire.messages import DoneEvent, EventKind
from tests.fakes.fleet import FakePrepost
from tests.integration.router.bench import Bench, running_router


@pytest.fixture
async def bench(nats_account: str) -> AsyncIterator[Bench]:
    async with buses.connect(nats_account, "bench") as bus:
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        prepost = FakePrepost(bus)
        bench = Bench(bus, await JobRecordStore.open(bus.jetstream), prepost)
        done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
        async with bus.listen(done, DoneEvent, bench.hear), prepost.run():
            yield bench


@pytest.fixture
async def stack(bench: Bench, nats_account: str) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "router-a"))
        yield stack
