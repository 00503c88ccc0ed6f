"""A denoiser's checkpoint, and a bench with the shared servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from giornata.blobs import RedisBlobs
from giornata.bus import bus, streams
from giornata.families import Family
from giornata.records import JobRecordStore
from giornata.wire.messages import DenoisedEvent, PreviewEvent, StepEvent
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from tests.integration.denoiser.bench import Bench


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Callable[[Family], Path]) -> Checkpoint:
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    return open_checkpoint(DenoiserConfig(model=str(folder), device="cpu"))


@pytest.fixture
async def bench(nats_url: str, redis_url: str, checkpoint: Checkpoint) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        blobs = await stack.enter_async_context(RedisBlobs.open(redis_url))
        await streams.ensure(connected.jetstream, replicas=1, events_ttl_s=60)
        made = Bench(
            connected,
            blobs,
            await JobRecordStore.open(connected.jetstream),
            checkpoint,
            (nats_url, redis_url),
        )
        pattern = "giornata.event.gateway-test.*"
        await stack.enter_async_context(connected.listen(f"{pattern}.step", StepEvent, made.steps.put_nowait))
        await stack.enter_async_context(
            connected.listen(f"{pattern}.preview", PreviewEvent, made.previews.put_nowait)
        )
        await stack.enter_async_context(
            connected.listen(f"{pattern}.denoised", DenoisedEvent, made.denoised.put_nowait)
        )
        yield made
