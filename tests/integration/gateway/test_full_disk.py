"""A full disk below NATS or the blob store: not ready, refused at once by its name, accepted again with room."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import pytest_asyncio

from giornata.blobs import RedisBlobs
from giornata.bus import streams
from giornata.wire.errors import BlobStoreFull, StorageFull
from giornata.wire.subjects import JOBS, RECORDS, bucket_stream
from tests.full_disk import SmallDisk, small_disk
from tests.integration.gateway_fakes import Answer, Stage, open_stage
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S
from tests.valkey import valkey

pytestmark = pytest.mark.real_nats

APPENDING = {"appendonly": "yes", "appendfsync": "no", "save": "", "maxmemory-policy": "noeviction"}
RECORD_STREAM = bucket_stream(RECORDS)


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk() as mounted:
        yield mounted


@pytest.fixture
def nats_on_disk(disk: SmallDisk) -> Iterator[NatsServer]:
    server = NatsServer(disk.folder)
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def on_disk(nats_on_disk: NatsServer, redis_url: str, tmp_path: Path) -> AsyncIterator[Stage]:
    async with open_stage(nats_on_disk.url, redis_url, tmp_path) as stage:
        await streams.ensure_queue(stage.router.bus.jetstream, replicas=1, max_messages=100)
        yield stage


async def ready(stage: Stage) -> Answer:
    return await stage.get("/readyz")


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it holds: nothing tells of a disk that has filled up, and the gateway tries every few seconds."""
    async with asyncio.timeout(HUNG_S):
        while not await holds():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.1)


async def test_a_disk_that_jetstream_has_filled_is_named_and_edits_are_refused_at_once(
    on_disk: Stage, nats_on_disk: NatsServer, disk: SmallDisk
) -> None:
    assert (await ready(on_disk)).status == 200
    assert (await on_disk.edit()).status == 200
    disk.fill()

    async def unready() -> bool:
        view = await ready(on_disk)
        return view.status == 503 and set(view.json["storage_full"]) == {JOBS, RECORD_STREAM}

    await eventually(unready)
    view = (await ready(on_disk)).json
    assert "disk of the NATS server is probably full" in view["storage_full"][JOBS]
    submitted = len(on_disk.router.submitted)
    assert (await on_disk.edit()).code == (503, "storage_full")
    assert len(on_disk.router.submitted) == submitted, "the router was not asked, and nothing was waited for"
    text = (await on_disk.get("/metrics")).text
    assert f'giornata_storage_full{{store="{JOBS}"}} 1.0' in text
    assert 'giornata_storage_full{store="blobs"} 0.0' in text

    disk.free()
    nats_on_disk.kill()  # JetStream's streams do not recover in the same process; what runs it starts it again
    nats_on_disk.start()

    async def accepted() -> bool:
        return (await on_disk.edit()).status == 200

    await eventually(accepted)
    assert (await ready(on_disk)).status == 200


async def test_a_blob_store_that_cannot_write_is_full_and_recovers_by_itself(
    nats_url: str, disk: SmallDisk, tmp_path: Path
) -> None:
    with valkey(disk.folder, APPENDING) as url:
        async with open_stage(nats_url, url, tmp_path) as stage, RedisBlobs.open(url) as blobs:
            kept = await blobs.put("kept", b"k" * 1000, 600)
            assert (await ready(stage)).status == 200
            disk.fill()

            async def overfill() -> None:
                for number in range(1000):
                    await blobs.write(f"other{number}", bytes(1 << 16), 600)

            with pytest.raises(StorageFull, match="No space left") as refused:
                await overfill()
            assert refused.value.retry_after_s
            answer = await stage.edit()
            assert answer.code == (503, "storage_full")
            assert "cannot write to its disk" in answer.error["message"]

            async def unready() -> bool:
                view = await ready(stage)
                return view.status == 503 and set(view.json["storage_full"]) == {"blobs"}

            await eventually(unready)
            assert await blobs.get(kept) == b"k" * 1000
            assert (await stage.get("/healthz")).status == 200, "the store answers"
            disk.free()

            async def accepted() -> bool:
                return (await stage.edit()).status == 200

            await eventually(accepted)

            async def ready_again() -> bool:
                return (await ready(stage)).status == 200

            await eventually(ready_again)


async def test_a_store_that_reached_its_own_limit_is_full_too(nats_url: str, tmp_path: Path) -> None:
    folder = tmp_path / "valkey"
    folder.mkdir()
    limits = {"maxmemory": "8mb", "maxmemory-policy": "noeviction", "save": ""}
    with valkey(folder, limits) as url:
        async with open_stage(nats_url, url, tmp_path) as stage, RedisBlobs.open(url) as blobs:
            assert (await ready(stage)).status == 200

            async def unready() -> bool:
                for size in (1 << 20, 1 << 16, 1 << 11):
                    with suppress(BlobStoreFull):
                        for number in range(40):
                            await blobs.write(f"fill{size}-{number}", bytes(size), 600)
                view = await ready(stage)
                return view.status == 503 and set(view.json["storage_full"]) == {"blobs"}

            await eventually(unready)
