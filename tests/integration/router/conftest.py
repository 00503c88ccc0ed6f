"""A bench with servers of its own, and what a test opens beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from tests.integration.router.bench import Bench, open_bench, running_router


@pytest.fixture
async def bench(nats_account: str) -> AsyncIterator[Bench]:
    async with open_bench(nats_account) as bench, bench.prepost.run():
        yield bench


@pytest.fixture
async def stack(bench: Bench, nats_account: str) -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(running_router(nats_account, "router-a"))
        yield stack
