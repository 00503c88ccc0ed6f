"""Tiny checkpoints of Flux, and what prepost opens of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire.models import ModelCard
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.pipeline import ImageModel


@pytest.fixture(scope="module", params=[Family.FLUX_INPAINT, Family.FLUX_FILL], ids=str)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def card(checkpoint: Path) -> ModelCard:
    return read_model_card(checkpoint, "tiny")


@pytest.fixture(scope="module")
def model(checkpoint: Path, card: ModelCard) -> ImageModel:
    return FAMILIES[card.family](checkpoint, card, torch.device("cpu"), torch.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def blobs(redis_url: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(redis_url) as store:
        yield store


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def caller(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as connected:
        yield connected
