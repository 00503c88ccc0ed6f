"""The bench of a ControlNet service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack

import pytest

from giornata.blobs import RedisBlobs
from giornata.bus import bus
from tests.integration.controlnet.bench import NETS, Bench, loaded, save_nets
from tests.shared_files import SharedFolders


@pytest.fixture(scope="session")
def folders(shared_folders: SharedFolders) -> Mapping[str, str]:
    """Folders of tiny ControlNets, by name."""
    folder = shared_folders.folder("controlnets", save_nets)
    return {name: str(folder / name) for name in NETS}


@pytest.fixture
async def bench(nats_url: str, redis_url: str, folders: Mapping[str, str]) -> AsyncIterator[Bench]:
    """No service runs yet."""
    with ExitStack() as links:
        async with bus.connect(nats_url, "test") as connected, RedisBlobs.open(redis_url) as blobs:
            yield Bench(connected, blobs, (nats_url, redis_url), folders, loaded(folders), links)
            links.close()
