"""The bench of a ControlNet service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

import pytest

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from tests.integration.controlnet.bench import Bench, loaded, saved


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Folders of tiny ControlNets, by name."""
    return saved(tmp_path_factory.mktemp("controlnets"))


@pytest.fixture
async def bench(nats_url: str, redis_url: str, folders: Mapping[str, str]) -> AsyncIterator[Bench]:
    """No service runs yet."""
    with ExitStack() as links:
        async with bus.connect(nats_url, "test") as connected, RedisBlobs.open(redis_url) as blobs:
            yield Bench(connected, blobs, (nats_url, redis_url), folders, loaded(folders), links)
            links.close()
