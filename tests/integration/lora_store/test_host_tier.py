"""The host tier of a real store: files on demand, by plan and by pin, over a NATS server and folders."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from giornata.bus import streams
from giornata.deadlines import Deadline
from giornata.lora_files import TIER_NAME, WHOLE_FILES
from giornata.residency.use_based import HostTiers
from giornata.wire import codec, subjects
from giornata.wire.errors import Failed, LoraNotFound, LoraPinsFull, LoraTooLarge, LoraUnreadable
from giornata.wire.loras import (
    CanonicalLora,
    HostTier,
    LoraRecord,
    LoraState,
    PinLora,
    StoredFile,
    TierLoadReply,
    TierLoadRequest,
    TierSnapshot,
    TierSnapshotRequest,
    WantedFiles,
    packed,
)
from giornata.wire.workers import ServiceState
from tests.integration.lora_bench import Store
from tests.patience import HUNG_MS, HUNG_S

MB = 1 << 20


def put(folder: Path, seed: int, size_bytes: int = MB // 4) -> StoredFile:
    """A file in the stores' folder."""
    data = bytes([seed]) * size_bytes
    digest = hashlib.sha256(data).hexdigest()
    (folder / WHOLE_FILES).mkdir(parents=True, exist_ok=True)
    (folder / WHOLE_FILES / digest).write_bytes(data)
    return StoredFile(sha256=digest, size_bytes=size_bytes)


class Heard:
    """What a router hears of one tier."""

    def __init__(self, name: str) -> None:
        self.name, self.tiers, self.instance = name, HostTiers(), ""
        self._news = asyncio.Event()

    def hear(self, state: ServiceState) -> None:
        if state.host_tier is not None and state.host_tier.name == self.name:
            self.instance = state.instance
            self.tiers.observe(state.instance, state.host_tier)
            self._news.set()

    @property
    def told(self) -> HostTier:
        told = self.tiers.told(self.name)
        assert told is not None
        return told

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(HUNG_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def holds(self, *files: StoredFile) -> None:
        await self.until(lambda: self.tiers.held(self.name).keys() == {file.sha256 for file in files})


@asynccontextmanager
async def hearing(bench: Store) -> AsyncIterator[Heard]:
    heard = Heard(bench.model)
    async with bench.bus.listen(subjects.telemetry_of("lora-store"), ServiceState, heard.hear):
        yield heard


def options(bench: Store, **more: object) -> dict[str, object]:
    return {
        "lora_host_folder": bench.folder.parent / "host",
        "cache_disk_mb": 1,
        "lora_host_name": bench.model,
        **more,
    }


async def bring(bench: Store, file: StoredFile, **fields: bool) -> TierLoadReply:
    request = TierLoadRequest(file=file, remaining_ms=HUNG_MS, **fields)
    return await bench.bus.call(
        subjects.bring(bench.model), request, TierLoadReply, Deadline.after_ms(HUNG_MS)
    )


async def want(bench: Store, number: int, *files: StoredFile) -> None:
    wanted = WantedFiles(epoch=(1, 1), number=number, sha256s=packed(file.sha256 for file in files))
    await put_wanted(bench, codec.encode(wanted))


async def put_wanted(bench: Store, value: bytes) -> None:
    bucket = await bench.bus.jetstream.key_value(subjects.WANTED)
    await bucket.put(subjects.wanted_key(bench.model), value)


async def test_a_file_on_demand_is_brought_once_and_stays(bench: Store) -> None:
    file = put(bench.folder, 1)
    async with bench.instance(**options(bench)), hearing(bench) as heard:
        assert (await bring(bench, file)).loaded
        folder = bench.folder.parent / "host"
        assert (folder / TIER_NAME).read_text() == bench.model
        found = (folder / WHOLE_FILES / file.sha256).read_bytes()
        assert hashlib.sha256(found).hexdigest() == file.sha256
        assert not (await bring(bench, file)).loaded
        await heard.until(lambda: heard.tiers.told(bench.model) is not None and heard.told.hits == 1)
        assert heard.told.loads.demand == 1


async def test_what_the_store_has_not_or_has_damaged_or_has_no_room_for_is_refused(bench: Store) -> None:
    file = put(bench.folder, 1)
    (bench.folder / WHOLE_FILES / file.sha256).write_bytes(b"damaged")
    async with bench.instance(**options(bench)):
        large = put(bench.folder, 2, 2 * MB)
        missing = StoredFile(sha256="0" * 64, size_bytes=1)
        for error, asked in ((LoraNotFound, missing), (LoraUnreadable, file), (LoraTooLarge, large)):
            with pytest.raises(error):
                await bring(bench, asked)
        assert list((bench.folder.parent / "host" / WHOLE_FILES).iterdir()) == []
        assert (await bring(bench, put(bench.folder, 1))).loaded, "what failed is not taken to be here"


async def test_a_snapshot_tells_what_a_listener_has_missed(bench: Store) -> None:
    files = [put(bench.folder, seed) for seed in range(3)]
    async with hearing(bench) as all_along, bench.instance(**options(bench)):
        for file in files:
            await bring(bench, file)
        await all_along.holds(*files)
        async with hearing(bench) as heard:
            await heard.until(lambda: bool(heard.tiers.gaps()))
            ask = TierSnapshotRequest(remaining_ms=HUNG_MS)
            snapshot = await bench.bus.call(
                subjects.tier(heard.instance), ask, TierSnapshot, Deadline.after_ms(HUNG_MS)
            )
            heard.tiers.snapshot(heard.instance, snapshot)
            assert heard.tiers.held(bench.model) == {file.sha256: file.size_bytes for file in files}
            assert not heard.tiers.gaps()


async def test_wanted_files_come_and_push_out_what_is_not_wanted(bench: Store) -> None:
    files = [put(bench.folder, seed) for seed in range(8)]
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        for file in files[:4]:
            await bring(bench, file)
        await want(bench, 1, *files[4:])
        await heard.holds(*files[4:])
        assert heard.told.loads.plan == 4
        await want(bench, 2, *files[2:6])
        await heard.holds(*files[2:6])


async def test_demand_takes_the_place_of_the_least_wanted(bench: Store) -> None:
    files = [put(bench.folder, seed) for seed in range(6)]
    async with hearing(bench) as heard, bench.instance(**options(bench, lora_scan_s=3600)):
        await want(bench, 1, *files[:5])
        await heard.holds(*files[:4])
        await bring(bench, files[5])
        await heard.holds(*files[:3], files[5])
        assert (heard.told.loads.plan, heard.told.evicted) == (4, 1), "none comes by plan for a wanted one"


async def test_older_and_unreadable_plans_are_ignored_and_told(bench: Store) -> None:
    one, two = put(bench.folder, 1), put(bench.folder, 2)
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        await want(bench, 2, one)
        await heard.holds(one)
        await want(bench, 1, two)
        await heard.until(lambda: heard.told.plans_ignored >= 1)
        await put_wanted(bench, b"no plan")
        await heard.until(lambda: heard.told.plans_ignored >= 2)
        assert set(heard.tiers.held(bench.model)) == {one.sha256}
        assert heard.told.plans == 1


async def test_plans_go_on_after_the_bucket_was_lost_and_the_store_was_restarted(bench: Store) -> None:
    files = [put(bench.folder, seed) for seed in range(3)]
    async with hearing(bench) as heard:
        async with bench.instance(**options(bench)):
            await want(bench, 7, files[0])
            await heard.holds(files[0])
            await bench.bus.jetstream.delete_key_value(subjects.WANTED)
            await bring(bench, files[1])  # demand loads go on
            await streams.ensure_shared(bench.bus.jetstream, replicas=1, events_ttl_s=3600)
            await want(bench, 8, files[2])
            await heard.holds(*files)
        await want(bench, 9, files[1])
        async with bench.instance(**options(bench)):
            await heard.until(lambda: heard.told.plans == 1 and heard.told.missing == 0)
            assert set(heard.tiers.held(bench.model)) == {file.sha256 for file in files}


async def test_a_store_that_stops_lets_go_of_planned_loads_and_leaves_no_part(bench: Store) -> None:
    file = put(bench.folder, 1, 12 * MB)
    slow = options(bench, cache_disk_mb=16, lora_plan_mb_s=1e-6)
    folder = bench.folder.parent / "host" / WHOLE_FILES
    async with hearing(bench) as heard, bench.instance(**slow):
        await want(bench, 1, file)
        await heard.until(lambda: heard.told.used_bytes == file.size_bytes and heard.told.missing == 1)
    assert list(folder.iterdir()) == []


async def test_demand_hastens_a_planned_load(bench: Store) -> None:
    file = put(bench.folder, 1, 12 * MB)
    slow = options(bench, cache_disk_mb=16, lora_plan_mb_s=1e-6)
    async with hearing(bench) as heard, bench.instance(**slow):
        await want(bench, 1, file)
        await heard.until(lambda: heard.told.used_bytes == file.size_bytes and heard.told.missing == 1)
        assert (await bring(bench, file)).loaded
        await heard.holds(file)
        await heard.until(lambda: heard.told.loads.demand == 1)
        assert heard.told.loads.plan == 0


async def test_a_folder_is_filled_by_one_store(bench: Store) -> None:
    async with bench.instance(**options(bench)):
        with pytest.raises(ExceptionGroup) as raised:
            async with bench.instance(**options(bench)):
                pass
        assert raised.group_contains(Failed, match="another LoRA store")


async def ready(bench: Store, file: StoredFile) -> LoraRecord:
    record = LoraRecord(
        lora_id=f"lora_{file.sha256[:8]}",
        tenant="t",
        created_s=1,
        state=LoraState.READY,
        canonical=CanonicalLora(file=file, model_digest="d", rank=1, modules=1),
    )
    await bench.records.create(record)
    return record


async def pin(bench: Store, record: LoraRecord, *, pinned: bool = True) -> LoraRecord:
    request = PinLora(lora_id=record.lora_id, tenant="t", pinned=pinned, remaining_ms=HUNG_MS)
    return await bench.bus.call(subjects.lora("pin"), request, LoraRecord, Deadline.after_ms(HUNG_MS))


async def test_pinned_loras_come_and_never_leave(bench: Store) -> None:
    files = [put(bench.folder, seed) for seed in range(6)]
    record = await ready(bench, files[0])
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        await heard.until(lambda: heard.tiers.told(bench.model) is not None)
        assert (await pin(bench, record)).pinned
        await heard.holds(files[0])
        for file in files[1:]:
            await bring(bench, file)
        assert files[0].sha256 in heard.tiers.held(bench.model)
        assert not (await pin(bench, record, pinned=False)).pinned
        await heard.until(lambda: heard.told.wanted == 0)


async def test_a_pin_beyond_the_budget_is_refused(bench: Store) -> None:
    small, large = put(bench.folder, 1), put(bench.folder, 2, MB)
    first, second = await ready(bench, small), await ready(bench, large)
    async with hearing(bench) as heard, bench.instance(**options(bench)):
        await heard.until(lambda: heard.tiers.told(bench.model) is not None)
        await pin(bench, first)
        await heard.holds(small)
        with pytest.raises(LoraPinsFull) as raised:
            await pin(bench, second)
        assert str(MB + MB // 4) in str(raised.value.received)
        assert str(MB) in str(raised.value.accepted)
