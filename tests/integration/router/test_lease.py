"""The lease at a real server: one holder, counted by the routers' clocks and by no server's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from nats.js.api import KeyValueConfig

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.bus import Bus
from giornata.wire.subjects import LEASES, bucket_stream
from giornata_router.leadership import MARGIN, Leadership, Lease, LeaseEndedError
from tests.patience import HUNG_S

LIFE_S = streams.LEASE_TTL_S
FREE_S = LIFE_S * MARGIN


class Candidate:
    """A router as far as the lease goes, with a clock of its own that stands unless it is moved."""

    def __init__(self, bus: Bus, name: str) -> None:
        self.now = 1000.0
        self.leadership = Leadership(lambda: self.now)
        self.bus, self._name = bus, name

    async def open(self) -> Candidate:
        self.bucket = await self.bus.jetstream.key_value(LEASES)
        self.lease = Lease(self.bus.jetstream, self.bucket, self._name, self.leadership, lambda: self.now)
        return self

    async def acquires(self) -> bool:
        await self.lease.acquire()
        return self.leadership.leads


@asynccontextmanager
async def candidates(url: str) -> AsyncIterator[tuple[Bus, Candidate, Candidate]]:
    async with buses.connect(url, "leases") as bus:
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        yield bus, await Candidate(bus, "a").open(), await Candidate(bus, "b").open()


async def test_one_holds_it_until_it_lets_go_or_is_not_seen_to_renew_for_longer_than_its_life(
    nats_account: str,
) -> None:
    async with candidates(nats_account) as (_, first, second):
        assert await first.acquires(), "it was never held"
        assert not await second.acquires()
        for _ in range(4):
            first.now += LIFE_S / 3
            second.now += LIFE_S / 3
            assert await first.lease.renew()
            assert not await second.acquires(), "it is renewed"
        await first.lease.release()
        assert not first.leadership.leads
        assert await second.acquires(), "a lease that was given up is free at once"
        assert second.leadership.check() > (await _epoch_of_first_write(first))
        assert not await first.acquires()
        first.now += FREE_S - 0.01
        assert not await first.acquires()
        first.now += 0.02
        assert await first.acquires(), "it was not renewed"
        assert not await second.lease.renew(), "its successor's revision is another"
        await second.lease.release()
        assert await first.lease.renew(), "which takes nothing from its successor"


async def _epoch_of_first_write(candidate: Candidate) -> tuple[int, int]:
    stream = await candidate.bus.jetstream.stream_info(bucket_stream(LEASES))
    assert stream.created is not None
    return int(stream.created.timestamp() * 1e6), 1


async def test_its_holder_counts_from_before_it_asked(nats_account: str) -> None:
    async with candidates(nats_account) as (_, first, _second):
        bucket = first.bucket
        update = bucket.update

        async def slow(*args: object, **options: object) -> int:
            first.now += 1
            return await update(*args, **options)  # type: ignore[arg-type]  # as it was called

        bucket.update = slow  # type: ignore[method-assign]  # the request takes a second by the holder's clock
        assert await first.acquires()
        first.now += LIFE_S - 1.1
        assert first.leadership.leads
        first.now += 0.2
        with pytest.raises(LeaseEndedError):
            first.leadership.check()
        assert not await first.lease.renew(), (
            "what has ended is not renewed, though no other router has it yet"
        )


async def test_a_lease_that_vanishes_early_is_not_taken_before_its_holder_stops(
    nats_account: str,
) -> None:
    """As when its bucket has a time to live and the new leader among the servers has a clock that is ahead."""
    async with candidates(nats_account) as (bus, first, second):
        assert await first.acquires()
        assert not await second.acquires()
        second.now += FREE_S - 0.1
        await bus.jetstream.purge_stream(bucket_stream(LEASES))
        assert not await second.acquires(), "it may have been renewed just before"
        second.now += FREE_S - 0.1
        first.now += LIFE_S - 0.1
        assert not await second.acquires()
        assert first.leadership.leads
        third = await Candidate(bus, "c").open()
        assert not await third.acquires(), "that it is absent says nothing to a router that has just come"
        second.now += 0.2
        assert await second.acquires()
        first.now += 0.2
        with pytest.raises(LeaseEndedError):
            first.leadership.check()


async def test_a_bucket_whose_entries_expire_is_used_as_safely(nats_account: str) -> None:
    async with buses.connect(nats_account, "leases") as bus:
        await bus.jetstream.create_key_value(KeyValueConfig(bucket=LEASES, ttl=1.0, history=1))
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        first, second = await Candidate(bus, "a").open(), await Candidate(bus, "b").open()
        assert await first.acquires()
        async with asyncio.timeout(HUNG_S):
            while (await bus.jetstream.stream_info(bucket_stream(LEASES))).state.messages:  # noqa: ASYNC110 - silent
                await asyncio.sleep(0.1)
        assert not await second.acquires()
        assert not await first.lease.renew(), "it is not certain"
        second.now += FREE_S
        assert await second.acquires()


async def test_the_epoch_is_higher_in_a_store_that_was_made_later(nats_account: str) -> None:
    async with candidates(nats_account) as (bus, first, second):
        for _ in range(3):
            assert await first.acquires()
            await first.lease.release()
        assert await first.acquires()
        before = first.leadership.check()
        await bus.jetstream.delete_stream(bucket_stream(LEASES))
        await asyncio.sleep(0.001)
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        assert await second.acquires()
        after = second.leadership.check()
        assert after.revision < before.revision
        assert after > before
