"""One suite for every blob store."""

from __future__ import annotations

import asyncio
import secrets
import traceback
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis.asyncio
from obstore.store import S3Store

from giornata.blobs import BlobStore, RedisBlobs, S3Blobs, open_blobs
from giornata.blobs.redis import CONNECTIONS
from giornata.blobs.s3 import END
from giornata.wire.errors import BlobStoreFull, InputLost, ServiceUnavailable
from giornata.wire.jobs import BlobRef
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.memory_network import NetworkedLoop
from tests.s3_server import BUCKET, CREDENTIALS, S3Server, s3_server
from tests.valkey import socket_folder, valkey

CAPACITY_BYTES = 8 << 20
LIFE_S = 1
"""Life of a blob whose end is waited for."""


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(scope="module")
def valkey_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with valkey(tmp_path_factory.mktemp("valkey")) as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(params=["memory", "redis", "s3"])
async def blobs(request: pytest.FixtureRequest) -> AsyncIterator[BlobStore]:
    """Each implementation."""
    if request.param == "memory":
        yield MemoryBlobs()
    elif request.param == "s3":
        request.getfixturevalue("credentials")
        server = request.getfixturevalue("s3")
        async with open_blobs(server.url(prefix=secrets.token_hex(4))) as store:
            yield store
    else:
        url = request.getfixturevalue("valkey_url")
        async with open_blobs(url) as store, redis.asyncio.Redis.from_url(url) as client:
            yield store
            await client.flushall()


@pytest.fixture(params=["memory", "redis", "s3"])
async def small(
    request: pytest.FixtureRequest, tmp_path: Path, credentials: None
) -> AsyncIterator[BlobStore]:
    """Each implementation, with room for about 8 MiB and no eviction."""
    if request.param == "memory":
        yield MemoryBlobs(capacity_bytes=CAPACITY_BYTES)
    elif request.param == "s3":
        with s3_server(volumes=1, volume_mb=CAPACITY_BYTES >> 20) as server:
            async with open_blobs(server.url()) as store:
                yield store
    else:
        config = {"maxmemory": str(CAPACITY_BYTES), "maxmemory-policy": "noeviction"}
        with valkey(tmp_path, config) as url:
            async with open_blobs(url) as store:
                yield store


async def test_what_is_put_is_got(blobs: BlobStore) -> None:
    for data in (b"", b"x", bytes(range(256)) * 4096):
        ref = await blobs.put("t/j/image", data, 60)
        assert ref.size_bytes == len(data)
        assert await blobs.get(ref) == data
        assert await blobs.has(ref)


async def test_a_claim_check_is_for_its_bytes_only(blobs: BlobStore) -> None:
    ref = await blobs.put("a", b"one", 60)
    await blobs.put("a", b"two", 60)
    with pytest.raises(InputLost, match="not the one"):
        await blobs.get(ref)


async def test_a_full_store_refuses_and_evicts_nothing(small: BlobStore) -> None:
    kept = await small.put("kept", b"k" * 1000, 60)

    async def overfill() -> None:
        for i in range(20):
            await small.put(f"big{i}", bytes([i]) * (1 << 20), 60)

    with pytest.raises(BlobStoreFull):
        await overfill()
    assert await small.get(kept) == b"k" * 1000


async def test_a_key_that_no_store_could_have_is_not_there(blobs: BlobStore) -> None:
    for key in ("", "a//b", "../other", "a/./b"):
        ref = BlobRef(key=key, size_bytes=1, sha256="")
        assert not await blobs.has(ref)
        assert not await blobs.renew(ref, 60)
        await blobs.delete(ref)
        with pytest.raises(InputLost):
            await blobs.get(ref)


async def test_a_blob_that_was_renewed_keeps_its_bytes(blobs: BlobStore) -> None:
    data = secrets.token_bytes(2 << 20)
    ref = await blobs.put("template", data, 60)
    for _ in range(3):
        assert await blobs.renew(ref, 3600)
    assert await blobs.get(ref) == data


async def test_delete_forgets_and_does_not_mind_what_is_not_there(blobs: BlobStore) -> None:
    ref = await blobs.put("a", b"x", 60)
    await blobs.delete(ref, ref)
    await blobs.delete()
    assert not await blobs.has(ref)


async def test_a_blob_ends_with_its_time_and_may_be_kept_for_longer_or_shorter(blobs: BlobStore) -> None:
    ended = await blobs.put("ended", b"x", LIFE_S)
    shorter = await blobs.put("shorter", b"x", 600)
    for _ in range(5):  # a machine that stands still may renew it too late
        longer = await blobs.put("longer", b"x", LIFE_S)
        if renewed := await blobs.renew(longer, 600):
            break
    assert renewed
    assert await blobs.renew(shorter, LIFE_S)
    assert not await blobs.renew(BlobRef(key="none", size_bytes=1, sha256=""), 60)
    await asyncio.sleep(LIFE_S + 0.2)
    assert [await blobs.has(ref) for ref in (longer, shorter, ended)] == [True, False, False]
    with pytest.raises(InputLost):
        await blobs.get(ended)


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("kind", "url"),
    [(RedisBlobs, "redis://127.0.0.1:1"), (S3Blobs, "s3://bucket?endpoint=http://127.0.0.1:1")],
)
def test_a_store_that_is_not_there_says_so_in_a_sentence(kind: type[RedisBlobs | S3Blobs], url: str) -> None:
    async def opened() -> None:
        async with kind.open(url, timeout_s=0.2):
            pass

    with (
        asyncio.Runner(loop_factory=NetworkedLoop) as runner,  # Redis is tried for seven seconds
        pytest.raises(ServiceUnavailable, match="GIORNATA_BLOBS_URL"),
    ):
        runner.run(opened())


@pytest.mark.usefixtures("credentials")
@pytest.mark.parametrize(
    ("kind", "url"),
    [(RedisBlobs, "redis://127.0.0.1:{}"), (S3Blobs, "s3://bucket?endpoint=http://127.0.0.1:{}")],
)
async def test_a_store_that_hangs_is_given_up_after_one_time_limit(
    kind: type[RedisBlobs | S3Blobs], url: str
) -> None:
    hanging, asked = asyncio.Event(), 0

    async def say_nothing(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await hanging.wait()
        writer.close()

    server = await asyncio.start_server(say_nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        with pytest.raises(ServiceUnavailable):
            async with kind.open(url.format(port), timeout_s=0.3):
                pass
        assert asked <= 1, "it was not asked again"
    finally:
        hanging.set()
        server.close()
        await server.wait_closed()


async def test_wrong_credentials_are_told_and_not_shown(
    s3: S3Server, credentials: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret")
    with pytest.raises(ServiceUnavailable, match="SignatureDoesNotMatch") as refused:
        async with open_blobs(s3.url()):
            pass
    shown = "".join(traceback.format_exception(refused.value))
    assert "s3cret" not in shown
    assert CREDENTIALS["AWS_ACCESS_KEY_ID"] not in shown


@pytest.mark.usefixtures("credentials")
async def test_a_bucket_that_is_missing_is_named(s3: S3Server) -> None:
    with pytest.raises(ServiceUnavailable, match="no bucket nowhere"):
        async with open_blobs(s3.url(bucket="nowhere")):
            pass


async def test_credentials_of_a_file(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CREDENTIALS:
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "giornata")
    for text, error in (("s3cret without a section", "no file of credentials"), ("[other]", "lacks")):
        file.write_text(text)
        with pytest.raises(ServiceUnavailable, match=error) as refused:
            async with open_blobs(s3.url()):
                pass
        assert "s3cret" not in "".join(traceback.format_exception(refused.value))
    file.write_text("[giornata]\n" + "\n".join(f"{k.lower()} = {v}" for k, v in CREDENTIALS.items()))
    async with open_blobs(s3.url()) as store:
        assert await store.get(await store.put("a", b"x", 60)) == b"x"


@pytest.mark.usefixtures("credentials")
async def test_an_object_that_was_renewed_is_not_written_at_every_renewal(s3: S3Server) -> None:
    """A template's picture is renewed by every edit."""
    reader = S3Store.from_url(
        f"s3://{BUCKET}/renewing", endpoint=s3.endpoint, client_options={"allow_http": True}
    )
    async with open_blobs(s3.url(prefix="renewing")) as store:
        ref = await store.put("template", b"x", 60)
        assert await store.renew(ref, 3600)
        ends = [reader.get("template").attributes[END]]
        assert await store.renew(ref, 3600)
        ends.append(reader.get("template").attributes[END])
    assert ends[0] == ends[1]


async def test_a_store_that_restarts_is_found_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {"appendonly": "yes"}
    folder = tmp_path_factory.mktemp("valkey")
    with ExitStack() as first, socket_folder() as sockets:
        url = first.enter_context(valkey(folder, config, sockets))
        async with RedisBlobs.open(url) as store:
            ref = await store.put("kept", b"k", 60)
            first.close()
            with valkey(folder, config, sockets):
                assert await store.get(ref) == b"k"


async def test_many_commands_share_few_connections(tmp_path_factory: pytest.TempPathFactory) -> None:
    with valkey(tmp_path_factory.mktemp("valkey")) as url:
        async with RedisBlobs.open(url) as store, redis.asyncio.Redis.from_url(url) as onlooker:
            refs = await asyncio.gather(
                *(store.put(f"key-{n}", b"data", 60) for n in range(20 * CONNECTIONS))
            )
            assert len(await onlooker.client_list()) <= CONNECTIONS + 1
            assert await asyncio.gather(*map(store.get, refs)) == [b"data"] * len(refs)
