"""Who may act as the leader: the holder until its lease must have ended, and another router only after that."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js import JetStreamContext
from nats.js.kv import KeyValue

from giornata.bus.streams import LEASE_TTL_S
from giornata.wire.messages import Epoch
from giornata_router.leadership import MARGIN, Leadership, Lease, LeaseEndedError, LeaseEntry, LeaseWatch

LIFE_S = 3.0
EPOCH = Epoch(1, 7)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_it_leads_until_the_lease_must_have_ended() -> None:
    clock = Clock()
    leadership = Leadership(clock)
    with pytest.raises(LeaseEndedError):
        leadership.check()
    leadership.begin(EPOCH, LIFE_S)
    clock.now = 2.9
    assert leadership.check() == EPOCH
    leadership.extend(2.0 + LIFE_S)
    clock.now = 4.9
    assert leadership.check() == EPOCH
    clock.now = 5.0
    with pytest.raises(LeaseEndedError):
        leadership.check()
    leadership.extend(100.0)
    with pytest.raises(LeaseEndedError):
        leadership.check()  # a late renewal does not bring back what has ended
    leadership.begin(Epoch(1, 9), 100.0)
    leadership.end()
    assert not leadership.leads


class SlowBucket:
    """Takes what is written, and answers a second later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def update(self, key: str, value: bytes, last: int) -> int:
        self._clock.now += 1.0
        return last + 1


def leads_at(now: float, leadership: Leadership, clock: Clock) -> bool:
    clock.now = now
    return leadership.leads


async def test_a_renewal_counts_from_before_it_was_asked_for() -> None:
    """The server may have taken it in at once, and another router counts from then."""
    clock = Clock()
    leadership, bucket = Leadership(clock), cast("KeyValue", SlowBucket(clock))
    lease = Lease(cast("JetStreamContext", None), bucket, "r", leadership, clock)
    leadership.begin(EPOCH, LEASE_TTL_S)
    assert await lease.renew()
    assert leads_at(LEASE_TTL_S - 0.1, leadership, clock)
    assert not leads_at(LEASE_TTL_S, leadership, clock)
    assert not await lease.renew()
    leadership.begin(EPOCH, clock.now + 0.5)
    assert not await lease.renew(), "it has ended before the answer came"


def test_a_lease_that_was_given_up_or_never_held_is_free_at_once() -> None:
    assert LeaseWatch(LIFE_S).see(LeaseEntry(0, free=True), 5.0) == 0.0
    assert LeaseWatch(LIFE_S).see(LeaseEntry(8, free=True), 5.0) == 0.0


def test_every_change_begins_the_wait_again_and_so_does_an_entry_that_vanishes() -> None:
    watch = LeaseWatch(LIFE_S)
    assert watch.see(LeaseEntry(1, free=False), 0.0) == pytest.approx(LIFE_S * MARGIN)
    assert watch.see(LeaseEntry(1, free=False), 3.0) == pytest.approx(LIFE_S * MARGIN - 3.0)
    assert watch.see(LeaseEntry(2, free=False), 3.2) == pytest.approx(LIFE_S * MARGIN)
    assert watch.see(LeaseEntry(0, free=False), 6.0) == pytest.approx(LIFE_S * MARGIN)
    assert watch.see(LeaseEntry(0, free=False), 6.0 + LIFE_S * MARGIN) == 0.0


@given(
    gaps_s=st.lists(st.floats(0.1, 2.9), max_size=10),
    took_s=st.floats(0.0, 1.0),
    looks_s=st.lists(st.floats(0.1, 5.0), min_size=5, max_size=40),
    vanishes_s=st.none() | st.floats(0.0, 20.0),
    offset_s=st.floats(-1e6, 1e6),
)
def test_no_two_lead_whatever_is_renewed_seen_or_vanishes_and_whatever_the_clocks_say(
    gaps_s: list[float], took_s: float, looks_s: list[float], vanishes_s: float | None, offset_s: float
) -> None:
    """The holder asks for renewals, each in force up to a second later, and the standby looks now and then."""
    asked = [0.0]
    for gap_s in gaps_s:
        asked.append(asked[-1] + gap_s)
    if vanishes_s is not None:
        asked = [at for at in asked if at + took_s < vanishes_s] or [0.0]
    ends_s = asked[-1] + LIFE_S
    watch, now = LeaseWatch(LIFE_S), took_s
    for look_s in looks_s:
        now += look_s
        gone = vanishes_s is not None and now >= max(vanishes_s, took_s)
        revision = 0 if gone else sum(at + took_s <= now for at in asked)
        if watch.see(LeaseEntry(revision, free=False), now + offset_s) == 0.0:
            assert now >= ends_s
            return
