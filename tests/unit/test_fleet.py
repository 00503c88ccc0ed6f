"""The fleet as telemetry tells it, and silence, which is counted in time over which one listened."""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import accumulate

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.bus import connection
from giornata.bus.connection import LOOK_S, FailFastNatsClient, LostError, TrackedSubscription, keep_looking
from giornata.fleet import COUNTED_S, SILENCE_S, Fleet, LastSeenTimes, ListeningClock
from giornata.wire import codec
from giornata.wire.errors import InvalidField, ModelNotFound, SchemaMismatch
from giornata.wire.workers import (
    CostFit,
    ServiceName,
    ServiceState,
    TelemetryReader,
    WorkerCosts,
    WorkerState,
)
from giornata_gateway.fleet import choose_card
from giornata_lab.bench.systems.networks import plain
from tests.fakes.fleet import CARD, state_of
from tests.present import present


def state(service: ServiceName, instance: str, **fields: object) -> ServiceState:
    return state_of(service, instance, models=(CARD,)).model_copy(update=fields)


def test_silence_is_death_and_is_told_once() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.DENOISER, "d1"), now=0)
    fleet.observe(state(ServiceName.DENOISER, "d2"), now=1)
    assert fleet.expire(SILENCE_S) == []
    assert [gone.instance for gone in fleet.expire(SILENCE_S + 0.5)] == ["d1"]
    assert fleet.expire(SILENCE_S + 0.5) == []
    assert fleet.get("d1") is None
    assert fleet.get("d2") is not None


def test_silence_counts_only_while_something_could_be_heard() -> None:
    heard = LastSeenTimes[str]()
    heard.hear("a", 0.0)
    heard.hear("b", 1.0)
    assert heard.silent(SILENCE_S) == []
    assert heard.silent(SILENCE_S + 0.5) == ["a"]
    heard.listen(5.0)
    assert heard.silent(5.0 + SILENCE_S) == []
    heard.hear("b", 6.0)
    assert heard.silent(5.1 + SILENCE_S) == ["a"]
    heard.forget("a")
    heard.forget("unknown")
    assert heard.silent(5.1 + SILENCE_S) == []


def test_only_ready_active_undrained_instances_take_work() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.ROUTER, "standby", active=False), 0)
    fleet.observe(state(ServiceName.DENOISER, "loading", ready=False), 0)
    fleet.observe(state(ServiceName.PREPOST, "leaving", draining=True), 0)
    wanted = (ServiceName.ROUTER, ServiceName.DENOISER, ServiceName.PREPOST)
    assert fleet.missing(wanted) == list(wanted)
    fleet.observe(state(ServiceName.ROUTER, "standby", active=True), 1)
    assert fleet.missing(wanted) == [ServiceName.DENOISER, ServiceName.PREPOST]


def test_a_model_is_served_only_where_both_halves_have_the_same_digest() -> None:
    fleet = Fleet()
    fleet.observe(state(ServiceName.DENOISER, "d1"), 0)
    assert fleet.cards() == {}
    fleet.observe(state(ServiceName.PREPOST, "p1", models=(CARD.model_copy(update={"digest": "other"}),)), 0)
    assert fleet.cards() == {}
    fleet.observe(state(ServiceName.PREPOST, "p2"), 0)
    assert fleet.cards() == {CARD.name: CARD}


def test_of_two_models_the_drained_one_is_not_served_and_the_other_goes_on() -> None:
    fleet, other = Fleet(), CARD.model_copy(update={"name": "other"})
    for card in (CARD, other):
        for service in (ServiceName.DENOISER, ServiceName.PREPOST):
            fleet.observe(state(service, f"{service}-{card.name}", models=(card,)), 0)
    with pytest.raises(InvalidField, match=f"other, {CARD.name}"):
        choose_card(fleet.cards(), None, ())
    drained = state(ServiceName.DENOISER, f"{ServiceName.DENOISER}-other", models=(other,), draining=True)
    fleet.observe(drained, 1)
    assert fleet.missing([ServiceName.DENOISER, ServiceName.PREPOST]) == []
    assert choose_card(fleet.cards(), None, ()) == choose_card(fleet.cards(), CARD.name, ()) == CARD
    with pytest.raises(ModelNotFound, match=f"Accepted: {CARD.name}"):
        choose_card(fleet.cards(), "other", ())


@given(
    st.lists(
        st.tuples(st.sampled_from(list(ServiceName)), st.integers(0, 9), st.booleans()),
        max_size=40,
    )
)
def test_all_are_in_order_however_they_come_and_go(moves: list[tuple[ServiceName, int, bool]]) -> None:
    fleet, live = Fleet(), dict[str, ServiceName]()
    for service, number, comes in moves:
        name = f"i{number}"
        if comes:
            fleet.observe(state(service, name), 0)
            live[name] = service
        else:
            fleet.forget(name)
            live.pop(name, None)
    assert [(s.service, s.instance) for s in fleet.all()] == sorted((s, name) for name, s in live.items())


# Silence is counted in time over which one listened: no live sender is lost, and every dead one is.


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


# Telemetry that repeats itself is read as it stands, and what repeats is validated once.


FIT = CostFit(weights=(1.0, 2.0), r2=1, residual_ms=0, samples=1, outliers=0)


def told(instance: str = "d1", *, steps: int = 0, blocks: int = 1, version: str = "0") -> bytes:
    worker = WorkerState(
        capacity_rows=8,
        capacity_tokens=1024,
        steps_total=steps,
        cost_model=WorkerCosts(compute=FIT, load=FIT),
        blocks=plain(blocks),
    )
    return codec.encode(state(ServiceName.DENOISER, instance, version=version, worker=worker))


def test_every_message_is_read_as_it_would_be_alone() -> None:
    reader = TelemetryReader()
    messages = [told(), told(steps=1), told("d2", blocks=2), told(blocks=3), told(version="1"), told("d2")]
    for message in messages:
        assert reader.read(message) == codec.decode(ServiceState, message)


def test_what_an_instance_repeats_stays_the_same_object() -> None:
    reader = TelemetryReader()
    first, second, changed = reader.read(told()), reader.read(told(steps=1)), reader.read(told(blocks=2))
    assert first.worker is not None
    assert second.worker is not None
    assert changed.worker is not None
    assert second.models[0] is first.models[0]
    assert second.worker.cost_model is first.worker.cost_model
    assert present(second.worker.blocks)[0] is present(first.worker.blocks)[0]
    assert changed.worker.cost_model is first.worker.cost_model
    assert changed.worker.blocks == plain(2)


def test_a_message_that_cannot_be_read_is_named_and_changes_nothing() -> None:
    reader = TelemetryReader()
    first = reader.read(told())
    fields = codec.unpack(told(blocks=2))
    del fields["host"]
    for message, named in ((msgpack.packb(fields), "host"), (b"\xc1", "msgpack")):
        with pytest.raises(SchemaMismatch, match=named):
            reader.read(message)
    assert reader.read(told()).models[0] is first.models[0]
