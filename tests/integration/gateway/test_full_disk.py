"""Stores that are full: a disk, JetStream, the blob store, and the share of it that one tenant has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import redis.asyncio

from giornata.blobs import RedisBlobs
from giornata.blobs import redis as redis_blobs
from giornata.bus import streams
from giornata.wire.errors import BlobStoreFull, StorageFull
from giornata.wire.jobs import BlobRef
from giornata.wire.subjects import JOBS, RECORDS, bucket_stream
from tests.fakes.key_files import write_keys
from tests.full_disk import SmallDisk, small_disk
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_edits import FLUX
from tests.integration.gateway.test_limits import ALICE, BOB, edit_picture, told
from tests.integration.gateway_fakes import Answer, Stage, open_gateway, open_stage
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


# One tenant fills the blob store up to its share. Another one's edits go on, and so do its own once it
# has room.


MIB: Final = 1 << 20
LIMITS: Final = {"maxmemory": str(32 * MIB), "maxmemory-policy": "noeviction", "save": ""}
KEYS: Final = {"sk-alice-123": "alice", "sk-robert-12": "bob"}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A blob store of 32 MiB; every write measures what tenants have."""
    for rest in ("MEASURED_S", "RESTS"):
        monkeypatch.setattr(redis_blobs, rest, 0)
    (tmp_path / "valkey").mkdir()
    with valkey(tmp_path / "valkey", LIMITS) as url:
        yield url


@pytest_asyncio.fixture(loop_scope="module")
async def blobs(store: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(store) as opened:
        yield opened


async def fill(blobs: RedisBlobs, folder: str) -> int:
    """Write MiB after MiB until the store refuses; how many it took."""
    for number in range(40):
        try:
            await blobs.write(f"{folder}/{number}", bytes(MIB), 600)
        except BlobStoreFull:
            return number
    pytest.fail("the store took more than it may hold")


async def test_a_tenant_with_its_share_is_refused_by_name_and_others_are_served(
    nats_url: str, store: str, blobs: RedisBlobs, tmp_path: Path
) -> None:
    options = {"api_keys_file": write_keys(tmp_path, KEYS)}
    async with (
        open_stage(nats_url, store, tmp_path, **options) as stage,
        open_gateway(stage.router, nats_url, store, tmp_path / "other", **options) as other,
    ):
        while (answer := await edit_picture(stage, ALICE, bytes(MIB))).status == 200:
            pass
        assert answer.code == (503, "blob_store_full")
        assert " of alice, " in answer.error["received"]
        assert answer.error["accepted"] == f"{32 * MIB} bytes, shared by all tenants"
        metrics = await told(stage)
        assert 'giornata_shared_pool_outcomes_total{outcome="refused",pool="blobs",tenant="alice"}' in metrics
        assert float(metrics.partition('giornata_shared_pool_limit{pool="blobs"} ')[2].split()[0]) == 32 * MIB
        assert (await edit_picture(other, ALICE, bytes(MIB))).status == 503, "another gateway finds the same"
        for gateway in (stage, other):
            assert (await edit_picture(gateway, BOB, bytes(MIB))).status == 200
        assert (await stage.get("/readyz")).status == 200

        async with redis.asyncio.from_url(store) as client:
            await client.delete(*await client.keys("giornata:alice/*"))
        assert (await edit_picture(stage, ALICE, bytes(MIB))).status == 200


async def test_a_generation_is_refused_too_where_its_tenant_has_its_share(
    nats_url: str, store: str, blobs: RedisBlobs, tmp_path: Path
) -> None:
    async with open_stage(nats_url, store, tmp_path, api_keys_file=write_keys(tmp_path, KEYS)) as stage:
        await stage.serve(CARD, FLUX)
        await fill(blobs, f"job_{'1' * 24}/alice")  # results go further than the door lets anything in
        for headers, expected in ((ALICE, 503), (BOB, 200)):
            asked = {"prompt": "a red star"}
            answer = await stage.post("/v1/images/generations", json=asked, headers=headers)
            assert answer.status == expected


async def test_what_stages_make_goes_on_where_the_door_is_closed_and_leaves_an_eighth_to_others(
    blobs: RedisBlobs,
) -> None:
    inputs = await fill(blobs, "alice/upload")
    results = await fill(blobs, f"job_{'1' * 24}/alice")
    assert inputs < 24, "the door leaves a quarter"
    assert inputs + results < 28, "stages leave an eighth"
    assert results > 0
    assert await fill(blobs, f"job_{'2' * 24}/bob") > 1, "which another tenant has"


async def test_a_tenant_whose_name_begins_as_jobs_do_has_one_share(blobs: RedisBlobs) -> None:
    await fill(blobs, "job_s/first")
    assert await fill(blobs, "job_s/second") == 0


async def test_one_tenant_alone_without_keys_has_it_all(blobs: RedisBlobs) -> None:
    assert await fill(blobs, "default/upload") > 24


async def test_a_tenant_of_more_weight_may_have_more(blobs: RedisBlobs) -> None:
    assert blobs.pool is not None
    blobs.pool.weight_of = lambda tenant: 4.0 if tenant == "alice" else 1.0
    for number in range(14):
        await blobs.write(f"alice/upload/{number}", bytes(MIB), 600)
    await fill(blobs, "bob/upload")
    await blobs.write("alice/upload/more", bytes(MIB), 600)
    with pytest.raises(BlobStoreFull, match="no room for more of this tenant"):
        await blobs.write("bob/upload/more", bytes(MIB), 600)
    for gone in range(9):
        await blobs.delete(BlobRef(key=f"bob/upload/{gone}", size_bytes=0, sha256=""))
    await blobs.write("bob/upload/more", bytes(MIB), 600)


@pytest.mark.parametrize("refused", ["-info", "-eval"])
async def test_a_server_that_does_not_tell_has_no_shares(store: str, refused: str) -> None:
    async with redis.asyncio.from_url(store) as client:
        await client.acl_setuser(
            "narrow", enabled=True, passwords=["+secret"], keys=["*"], commands=["+@all", refused]
        )
    async with redis.asyncio.from_url(store, username="narrow", password="secret") as client:  # noqa: S106
        blobs = RedisBlobs(client)
        assert await fill(blobs, "alice/upload") > 24
        for gone in range(3):
            await blobs.delete(BlobRef(key=f"alice/upload/{gone}", size_bytes=0, sha256=""))
        for _ in range(20):  # in place of what the key had
            await blobs.write("alice/upload/3", bytes(MIB), 600)
