"""Plans of placement with real routers, a real LoRA store and a NATS server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from giornata.bus import streams
from giornata.wire import codec, subjects
from giornata.wire.loras import StoredFile, WantedFiles
from tests.integration.lora_bench import Store, open_bench
from tests.integration.lora_store.test_host_tier import hearing, options, put, ready
from tests.integration.router.bench import running_router


@pytest.fixture
async def bench(nats_account: str, tmp_path: Path) -> AsyncIterator[Store]:
    async with open_bench(nats_account, tmp_path) as opened:
        await streams.ensure(opened.bus.jetstream, replicas=1, events_ttl_s=3600)
        yield opened


async def registered(bench: Store, seed: int) -> StoredFile:
    """A LoRA that has just become ready."""
    file = put(bench.folder, seed)
    record = await ready(bench, file)
    now_s = 2**31 - 1  # always new
    await bench.records.change("t", record.lora_id, lambda one: one.model_copy(update={"created_s": now_s}))
    return file


async def written(bench: Store) -> WantedFiles:
    bucket = await bench.bus.jetstream.key_value(subjects.WANTED)
    entry = await bucket.get(subjects.wanted_key(bench.model))
    assert entry.value is not None
    return codec.decode(WantedFiles, entry.value)


async def test_a_registered_lora_goes_to_its_home(bench: Store) -> None:
    file = await registered(bench, 1)
    async with (
        hearing(bench) as heard,
        bench.instance(**options(bench)),
        running_router(bench.nats_url, "router-a", placement_s=0.1),
    ):
        await heard.holds(file)
        assert heard.told.loads.plan == 1
        later = await registered(bench, 2)
        await heard.holds(file, later)


async def test_plans_go_on_when_the_router_dies_and_the_bucket_is_lost(bench: Store) -> None:
    first = await registered(bench, 1)
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        async with running_router(bench.nats_url, "router-a", placement_s=0.1) as router:
            await heard.holds(first)
            before = await written(bench)
            router.cancel()
            await asyncio.wait([router])
        second = await registered(bench, 2)
        await bench.bus.jetstream.delete_key_value(subjects.WANTED)
        await streams.ensure_shared(bench.bus.jetstream, replicas=1, events_ttl_s=3600)
        async with running_router(bench.nats_url, "router-b", placement_s=0.1):
            await heard.holds(first, second)
            assert (await written(bench)).revision > before.revision


async def test_a_store_that_is_restarted_is_filled_again(bench: Store) -> None:
    file = await registered(bench, 1)
    async with hearing(bench) as heard, running_router(bench.nats_url, "router-a", placement_s=0.1):
        async with bench.instance(**options(bench)):
            await heard.holds(file)
        (bench.folder.parent / "host" / "files" / file.sha256).unlink()
        async with bench.instance(**options(bench)):
            await heard.until(lambda: heard.told.loads.plan == 1 and heard.told.missing == 0)
            await heard.holds(file)


async def test_a_plan_is_written_only_when_it_has_changed(bench: Store) -> None:
    file = await registered(bench, 1)
    async with (
        hearing(bench) as heard,
        bench.instance(**options(bench)),
        running_router(bench.nats_url, "router-a", placement_s=0.1),
    ):
        await heard.holds(file)
        before = await written(bench)
        numbers = heard.told.number
        later = await registered(bench, 2)  # rounds have gone by
        await heard.holds(file, later)
        assert heard.told.number == numbers + 1
        assert (await written(bench)).number - before.number <= 2
