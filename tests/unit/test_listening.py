"""Silence is counted in time over which one listened: no live sender is lost, and every dead one is."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.bus import connection
from giornata.bus.connection import LOOK_S, FailFastNatsClient, LostError, TrackedSubscription, keep_looking
from giornata.fleet import COUNTED_S, SILENCE_S, LastSeenTimes, ListeningClock

TELLS_S = 0.5
"""Twice a second, the slowest telemetry."""
PLENTY_S = 2 * SILENCE_S


def test_it_goes_on_at_ticks_and_counts_a_long_interval_in_part() -> None:
    clock = ListeningClock()
    clock.tick(100.0)
    assert clock.listened_s == 0.0
    clock.tick(100.25)
    assert clock.listened_s == 0.25
    clock.tick(105.25)
    assert clock.listened_s == 0.25 + COUNTED_S
    clock.pause()
    clock.tick(200.0)
    clock.tick(200.5)
    assert clock.listened_s == pytest.approx(0.75 + COUNTED_S)


class Listener:
    """One process that hears `alive` for ever and `dead` until it dies, both over one connection, in order.

    It handles what has come before it ticks, as :func:`giornata.bus.connection.keep_looking` does.
    """

    def __init__(self, dies_s: float) -> None:
        self.clock, self.heard = ListeningClock(), LastSeenTimes[str]()
        self.lost: dict[str, float] = {}
        """When each was first found silent."""
        self._dies_s = dies_s
        self._told_s = 0.0
        self._under_way = deque[tuple[float, str]]()

    def ticks(self, now: float, handled_s: float, *, standing_from: float | None = None) -> None:
        """A tick that began at `now` and ended at `handled_s`; the machine may have stood since a time."""
        while self._told_s <= handled_s:
            if standing_from is None or not standing_from < self._told_s < now:
                self._under_way.append((self._told_s, "alive"))
                if self._told_s < self._dies_s:
                    self._under_way.append((self._told_s, "dead"))
            self._told_s += TELLS_S
        while self._under_way and self._under_way[0][0] <= now:
            self.heard.hear(self._under_way.popleft()[1], self.clock.listened_s)
        self.clock.tick(now)
        for name in self.heard.silent(self.clock.listened_s):
            self.lost.setdefault(name, handled_s)


@given(
    pauses_s=st.lists(st.floats(LOOK_S, 8.0), min_size=1, max_size=60),
    lag_s=st.floats(0.0, 5.0),
    whole_machine=st.booleans(),
)
def test_however_one_stands_still_or_lags_only_the_dead_are_lost(
    pauses_s: list[float], lag_s: float, *, whole_machine: bool
) -> None:
    """After each pause of the list comes a tick; messages are handled `lag_s` later than they come."""
    listener, before = Listener(dies_s=0.1), 0.0
    for now in accumulate(pauses_s):
        listener.ticks(now, now + lag_s, standing_from=before if whole_machine else None)
        # a machine that has stood still lets its senders go on as well
        for soon in (0.3, 0.6) if whole_machine else ():
            listener.ticks(now + soon, now + soon + lag_s)
        before = now + 0.6
    assert "alive" not in listener.lost


@given(lag_s=st.floats(0.0, 5.0))
def test_an_overloaded_process_notices_a_death_later(lag_s: float) -> None:
    """Its backlog never empties: each tick waits `lag_s` for what has come before it, and the next begins then."""
    listener, now = Listener(dies_s=10.0), 0.0
    while now < 100.0:
        listener.ticks(now, now + lag_s)
        now += LOOK_S + lag_s
    assert listener.lost.keys() == {"dead"}
    slowness = max(1.0, (LOOK_S + lag_s) / COUNTED_S)
    assert listener.lost["dead"] >= 10.0 + SILENCE_S - COUNTED_S - TELLS_S
    assert listener.lost["dead"] <= 10.0 + (SILENCE_S + 2 * COUNTED_S) * slowness + lag_s


class Backlog(TrackedSubscription):
    """A subscription with messages that are not handled yet, or without a connection."""

    def __init__(self) -> None:
        super().__init__(FailFastNatsClient())
        self.asked, self.handled_all, self.lost = asyncio.Event(), asyncio.Event(), False

    async def caught_up(self) -> None:
        self.asked.set()
        await self.handled_all.wait()
        if self.lost:
            raise LostError


async def test_nothing_is_judged_before_all_that_came_is_handled_and_nothing_counts_while_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "LOOK_S", 0.01)
    backlog, clock, looked = Backlog(), ListeningClock(), asyncio.Event()
    task = asyncio.create_task(keep_looking(backlog, clock, looked.set))
    await backlog.asked.wait()
    await asyncio.sleep(0)
    assert not looked.is_set()
    backlog.handled_all.set()
    for lost in (False, False, True, True):
        looked.clear()
        await looked.wait()
        before, backlog.lost = clock.listened_s, lost
    assert before > 0
    looked.clear()
    await looked.wait()
    assert clock.listened_s == before
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
