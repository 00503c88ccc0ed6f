"""A mirror of a bucket against what the bucket itself tells."""

from __future__ import annotations

import asyncio
import secrets

import pytest

from giornata.bus import bus, streams
from giornata.records import FEW, MANY, BucketMirror, LoraRecords
from giornata.wire.loras import LoraRecord, LoraState

OWNERS = ("alice", "bob")


def made(tenant: str, number: int) -> LoraRecord:
    return LoraRecord(lora_id=f"lora_{number}", tenant=tenant, created_s=number, state=LoraState.READY)


@pytest.mark.parametrize("changes", [1, FEW, 3 * FEW, MANY + FEW])
async def test_it_tells_what_the_bucket_tells_after_any_changes(nats_url: str, changes: int) -> None:
    tenants = [f"{name}-{secrets.token_hex(4)}" for name in OWNERS]
    async with bus.connect(nats_url, "test") as connected:
        await streams.ensure_shared(connected.jetstream, replicas=1, events_ttl_s=3600)
        records = await LoraRecords.open(connected.jetstream)
        mirror = BucketMirror(records.bucket)
        for first in range(3):
            for number in range(first, first + changes):
                record = made(tenants[number % 2], number)
                await records.bucket.put(record)
                if number % 3 == 0:
                    await records.delete(record)
            await asyncio.gather(mirror.refresh(), mirror.refresh())
            for tenant in tenants:
                wanted = {one.lora_id: one for one in await records.all_of(tenant)}
                assert {one.lora_id: one for one in mirror.of(tenant)} == wanted
        assert mirror.of("nobody") == []


async def test_it_reads_what_has_changed_and_nothing_else(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tenant = f"tenant-{secrets.token_hex(4)}"
    async with bus.connect(nats_url, "test") as connected:
        await streams.ensure_shared(connected.jetstream, replicas=1, events_ttl_s=3600)
        records = await LoraRecords.open(connected.jetstream)
        mirror = BucketMirror(records.bucket)
        await asyncio.gather(*(records.create(made(tenant, number)) for number in range(10)))
        await mirror.refresh()
        asked: list[int] = []
        get_msg = connected.jetstream.get_msg

        async def counted(stream: str, seq: int, subject: str, *, next: bool) -> object:  # noqa: A002 - as nats-py names it
            asked.append(seq)
            return await get_msg(stream, seq, subject, next=next)

        monkeypatch.setattr(connected.jetstream, "get_msg", counted)
        await mirror.refresh()
        assert asked == []
        await records.bucket.put(made(tenant, 11))
        await mirror.refresh()
        assert len(asked) == 1
        assert len(mirror.of(tenant)) == 11
