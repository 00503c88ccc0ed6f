"""A blob store, a client that asks instances of prepost, and an instance for the tests of a module."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.models import ModelCard
from giornata_prepost.checkpoint import open_model
from giornata_prepost.families.pipeline import ImageModel
from tests.integration.prepost.asking import configured, own_name, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blobs(redis_url: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(redis_url) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as connected:
        yield connected


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    """The family of the module's checkpoint, or that of an indirect parameter."""
    return Family(getattr(request, "param", request.module.FAMILY))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(
    family: Family,
    tiny_checkpoint: Callable[[Family], Path],
    nats_url: str,
    redis_url: str,
    caller: Bus,
    blobs: RedisBlobs,
) -> AsyncIterator[ImageModel]:
    """The model of an instance that answers, under a name of its own."""
    config = configured(tiny_checkpoint(family), nats_url, redis_url, model_name=own_name())
    opened = open_model(config)
    async with serving(config, caller, blobs, opened):
        yield opened


@pytest.fixture(scope="module")
def card(model: ImageModel) -> ModelCard:
    """The card of an instance that answers."""
    return model.card
