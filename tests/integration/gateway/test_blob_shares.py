"""One tenant fills the blob store up to its share. Another one's edits go on, and so do its own once it has room."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import pytest_asyncio
import redis.asyncio

from giornata.blobs import RedisBlobs
from giornata.blobs import redis as redis_blobs
from giornata.wire.errors import BlobStoreFull
from giornata.wire.jobs import BlobRef
from tests.fakes.key_files import write_keys
from tests.integration.fake_router import CARD
from tests.integration.gateway.test_edits import FLUX
from tests.integration.gateway.test_shared_pools import ALICE, BOB, edit, told
from tests.integration.gateway_fakes import open_gateway, open_stage
from tests.valkey import valkey

pytestmark = pytest.mark.real_nats

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
        while (answer := await edit(stage, ALICE, bytes(MIB))).status == 200:
            pass
        assert answer.code == (503, "blob_store_full")
        assert " of alice, " in answer.error["received"]
        assert answer.error["accepted"] == f"{32 * MIB} bytes, shared by all tenants"
        metrics = await told(stage)
        assert 'giornata_shared_pool_outcomes_total{outcome="refused",pool="blobs",tenant="alice"}' in metrics
        assert float(metrics.partition('giornata_shared_pool_limit{pool="blobs"} ')[2].split()[0]) == 32 * MIB
        assert (await edit(other, ALICE, bytes(MIB))).status == 503, "another gateway finds the same"
        for gateway in (stage, other):
            assert (await edit(gateway, BOB, bytes(MIB))).status == 200
        assert (await stage.get("/readyz")).status == 200

        async with redis.asyncio.from_url(store) as client:
            await client.delete(*await client.keys("giornata:alice/*"))
        assert (await edit(stage, ALICE, bytes(MIB))).status == 200


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
