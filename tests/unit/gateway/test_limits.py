"""What there is room for: rows and bodies in a gateway, and what tenants may still do."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.shares import SharedPool
from giornata.wire.errors import (
    ConcurrencyLimited,
    InvalidField,
    RateLimited,
    ServiceUnavailable,
    TooManyRequests,
    TooManyStreams,
)
from giornata_gateway import admission as limits
from giornata_gateway.admission import ConcurrencyLimiter, MemoryLimiter, PicturesInProgress, Quotas, Tenant

ALICE, BOB = Tenant("alice"), Tenant("bob")
STREAMS = "event streams", TooManyStreams


pool = SharedPool


def shared(limit: int, **options: Any) -> SharedPool:
    """A pool to which other tenants may come."""
    return pool(limit, lambda: False, **options)


def test_rows_count_not_requests() -> None:
    admission = ConcurrencyLimiter(pool(4))
    with admission.held(ALICE, 1):
        with admission.held(ALICE, 3), pytest.raises(TooManyRequests), admission.held(ALICE, 1):
            pass
        with admission.held(ALICE, 2):
            assert admission.taken == 3
    assert admission.taken == 0


def test_a_check_takes_nothing_and_refuses_what_would_be_refused() -> None:
    admission = ConcurrencyLimiter(pool(2), *STREAMS)
    with admission.held(ALICE, 1):
        admission.check(ALICE)
        assert admission.taken == 1
        with pytest.raises(TooManyStreams, match="2 event streams at a time"):
            admission.check(ALICE, 2)


def test_a_closed_gateway_admits_nothing() -> None:
    admission = ConcurrencyLimiter(pool(2))
    admission.closed = True
    with pytest.raises(ServiceUnavailable), admission.held(ALICE, 1):
        pass


def test_retry_after_follows_how_long_edits_take() -> None:
    admission = ConcurrencyLimiter(pool(2))
    quick = admission.estimate_s(4, 2)
    for _ in range(30):
        with admission.held(ALICE, 1) as stay:
            stay.seconds = 20
    assert admission.estimate_s(4, 2) > quick >= 1
    assert admission.estimate_s(4, 2) == pytest.approx(40, abs=1)
    with admission.held(ALICE, 2), pytest.raises(TooManyRequests) as refused:
        admission.check(ALICE, 4)
    assert refused.value.retry_after_s == admission.estimate_s(4, 2)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=40))
def test_never_above_the_limit_but_for_one_alone(limit: int, requests: list[tuple[int, bool]]) -> None:
    admission = ConcurrencyLimiter(pool(limit))
    held: list[tuple[int, ExitStack]] = []
    for rows, leaves in requests:
        with suppress(TooManyRequests), ExitStack() as stack:
            stack.enter_context(admission.held(ALICE, rows))
            held.append((rows, stack.pop_all()))
        if leaves and held:
            held.pop(0)[1].close()
        assert admission.taken == sum(rows for rows, _ in held)
        assert admission.taken <= limit or len(held) == 1


async def test_a_stream_ends_for_a_tenant_that_has_fewer() -> None:
    admission, begun, ended = ConcurrencyLimiter(shared(3), *STREAMS), asyncio.Semaphore(0), asyncio.Event()

    async def look_on() -> None:
        try:
            async with admission.lent(ALICE):
                begun.release()
                await asyncio.Event().wait()
        except TooManyStreams:
            ended.set()

    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(look_on()) for _ in range(3)]
        for _ in others:
            await begun.acquire()
        async with admission.lent(BOB):
            assert admission.pool.held("bob") == 1
            await ended.wait()
            with pytest.raises(TooManyStreams):
                await admission.lent(ALICE).__aenter__()
        for other in others:
            other.cancel()
    assert admission.pool.outcomes == {("alice", "taken_back"): 1, ("alice", "refused"): 2}
    assert admission.taken == 0


def test_what_grows_is_refused_above_the_limit_and_given_back() -> None:
    held = MemoryLimiter(pool(100))
    with held.growing(ALICE) as first, held.growing(ALICE) as second:
        first(60)
        second(40)
        with pytest.raises(TooManyRequests) as refused:
            second(1)
        assert refused.value.retry_after_s
    assert held.pool.used == 0


async def test_a_body_that_rests_ends_for_a_tenant_that_has_less() -> None:
    held, stalled = MemoryLimiter(shared(100)), asyncio.Event()

    async def upload() -> None:
        with held.growing(ALICE) as grow:
            async with grow.receiving():
                grow(100)
                stalled.set()
                await asyncio.Event().wait()

    resting = asyncio.create_task(upload())
    await stalled.wait()
    with held.growing(BOB) as grow:
        grow(30)
        with pytest.raises(TooManyRequests):
            await resting
        assert held.pool.used == 30


async def test_a_body_that_was_received_is_not_thrown_away() -> None:
    held = MemoryLimiter(shared(100))
    with held.growing(ALICE) as grow, held.growing(BOB) as other:
        async with grow.receiving():
            grow(100)
        with pytest.raises(TooManyRequests):
            other(30)


async def test_answers_wait_for_room_in_the_order_in_which_they_came() -> None:
    held = MemoryLimiter(pool(100))
    told: list[str] = []

    async def answer(name: str, size: int) -> None:
        async with held.room(ALICE, size):
            told.append(name)

    async with asyncio.TaskGroup() as tasks, held.room(ALICE, 60):
        for name, size in (("large", 80), ("small", 10)):
            tasks.create_task(answer(name, size))
            await asyncio.sleep(0)
        assert told == []
    assert told == ["large", "small"]
    assert held.pool.used == 0


async def test_a_slow_reader_is_cut_off_for_a_tenant_that_has_less() -> None:
    held, cut = MemoryLimiter(shared(100)), asyncio.Event()
    async with held.room(ALICE, 100, cut.set), held.room(BOB, 40):
        assert cut.is_set()
        assert (held.pool.held("alice"), held.pool.held("bob")) == (0, 40)


async def test_a_young_answer_is_not_cut_off_and_the_next_tenant_passes_those_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, cut = MemoryLimiter(shared(100, grace_s=0.1)), asyncio.Event()
    now_s, told = 0.0, list[str]()
    monkeypatch.setattr(limits, "monotonic", lambda: now_s)

    async def answer(tenant: Tenant) -> None:
        async with held.room(tenant, 40):
            told.append(tenant.name)

    async with asyncio.TaskGroup() as tasks, held.room(ALICE, 100, cut.set):
        for tenant in (ALICE, ALICE, BOB):
            tasks.create_task(answer(tenant))
            await asyncio.sleep(0)
        assert not told
        assert not cut.is_set()
        now_s = 1.0
        await cut.wait()
    assert told == ["bob", "alice", "alice"]


async def test_an_answer_whose_request_ends_while_it_waits_keeps_nobody_out() -> None:
    held = MemoryLimiter(pool(100))
    async with held.room(ALICE, 60):
        leaves = asyncio.ensure_future(held.room(ALICE, 50).__aenter__())
        stays = asyncio.ensure_future(held.room(ALICE, 90).__aenter__())
        await asyncio.sleep(0)
        leaves.cancel()
    await stays
    assert held.pool.used == 90


async def test_one_above_the_limit_is_held_alone() -> None:
    held = MemoryLimiter(pool(100))
    async with held.room(ALICE, 500):
        assert held.pool.used == 500


async def test_no_room_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROOM_S", 0.01)
    held = MemoryLimiter(pool(100))
    async with held.room(ALICE, 60):
        with pytest.raises(ServiceUnavailable):
            await held.room(ALICE, 60).__aenter__()
    async with held.room(ALICE, 100):
        assert held.pool.used == 100


# What tenants may still do: pictures in progress and in a minute, each counted once, refused with an honest
# time.


class Clock:
    """Seconds, as the test says."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the gateway and of its buckets."""
    clock = Clock()
    monkeypatch.setattr("throttled.utils.now_mono_f", clock)
    return clock


def quotas_of(clock: Clock, refusals: list[tuple[str, str]] | None = None) -> Quotas:
    told = [] if refusals is None else refusals
    return Quotas(
        lambda pictures, at_a_time: 10 * pictures / at_a_time, lambda *refusal: told.append(refusal), clock
    )


def test_pictures_in_progress_are_counted_until_they_leave(clock: Clock) -> None:
    refusals: list[tuple[str, str]] = []
    quotas = quotas_of(clock, refusals)
    alice, bob = Tenant("alice", in_progress=4), Tenant("bob", in_progress=1)
    assert quotas.enter(alice, 3, "job_1", 60)
    with pytest.raises(ConcurrencyLimited, match="2 pictures while 3 are in progress") as caught:
        quotas.enter(alice, 2, "job_2", 60)
    assert caught.value.retry_after_s == pytest.approx(10 * 1 / 4)
    quotas.check(alice)
    assert quotas.enter(alice, 1, "job_3", 60)
    with pytest.raises(ConcurrencyLimited):
        quotas.check(alice)
    assert quotas.enter(bob, 1, "job_4", 60), "another tenant's pictures are not alice's"
    quotas.leave("job_1")
    quotas.leave("job_1")
    assert quotas.enter(alice, 3, "job_5", 60)
    assert refusals == [("alice", "concurrency_limit_exceeded")] * 2


def test_a_repeated_request_counts_once(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1, per_minute=1)
    assert quotas.enter(alice, 1, "job_1", 60)
    assert not quotas.enter(alice, 1, "job_1", 60)


def test_a_job_whose_end_is_not_heard_counts_until_its_time_is_over(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1)
    quotas.enter(alice, 1, "job_1", 60)
    clock.now_s += 59.9
    with pytest.raises(ConcurrencyLimited):
        quotas.check(alice)
    clock.now_s += 0.1
    assert quotas.enter(alice, 1, "job_2", 60)


def test_the_minute_says_to_the_moment_when_an_edit_fits_again(clock: Clock) -> None:
    refusals: list[tuple[str, str]] = []
    quotas = quotas_of(clock, refusals)
    alice = Tenant("alice", per_minute=6)
    for number in range(6):
        quotas.enter(alice, 1, f"job_{number}", 60)
    assert quotas.headers(alice) == {
        "RateLimit-Policy": '"pictures";q=6;w=60',
        "RateLimit": '"pictures";r=0;t=60',
    }
    with pytest.raises(RateLimited, match="6 pictures a minute, 0 of them now") as caught:
        quotas.enter(alice, 2, "job_6", 60)
    assert caught.value.retry_after_s == pytest.approx(20)
    with pytest.raises(RateLimited) as caught:
        quotas.check(alice)
    assert caught.value.retry_after_s == pytest.approx(10)
    clock.now_s += 19.9
    with pytest.raises(RateLimited):
        quotas.enter(alice, 2, "job_6", 60)
    quotas.check(alice)
    clock.now_s += 0.2
    assert quotas.enter(alice, 2, "job_6", 60)
    assert refusals == [("alice", "rate_limit_exceeded")] * 3


def test_who_is_refused_for_what_is_in_progress_has_spent_nothing(clock: Clock) -> None:
    quotas = quotas_of(clock)
    alice = Tenant("alice", in_progress=1, per_minute=2)
    quotas.enter(alice, 1, "job_1", 60)
    for _ in range(5):
        with pytest.raises(ConcurrencyLimited):
            quotas.enter(alice, 1, "job_2", 60)
    quotas.leave("job_1")
    assert quotas.enter(alice, 1, "job_2", 60)


@pytest.mark.parametrize("tenant", [Tenant("alice", in_progress=3), Tenant("alice", per_minute=3)])
def test_what_could_never_be_admitted_is_not_told_to_come_again(clock: Clock, tenant: Tenant) -> None:
    with pytest.raises(InvalidField, match="at most 3 pictures") as caught:
        quotas_of(clock).enter(tenant, 4, "job_1", 60)
    assert caught.value.field == "n"


def test_a_tenant_without_limits_is_told_none(clock: Clock) -> None:
    quotas = quotas_of(clock)
    for number in range(1000):
        quotas.enter(Tenant("alice"), 10, f"job_{number}", 60)
    assert quotas.headers(Tenant("alice")) == {}


def test_a_raised_limit_holds_at_once(clock: Clock) -> None:
    quotas = quotas_of(clock)
    quotas.enter(Tenant("alice", per_minute=1), 1, "job_1", 60)
    with pytest.raises(RateLimited):
        quotas.check(Tenant("alice", per_minute=1))
    quotas.check(Tenant("alice"))


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 4), st.floats(0, 30)), max_size=60))
def test_the_limit_holds_over_time(asked: list[tuple[str, int, float]]) -> None:
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("throttled.utils.now_mono_f", clock)
        quotas = quotas_of(clock)
        admitted = {"a": 0, "b": 0}
        for number, (name, pictures, pause_s) in enumerate(asked):
            clock.now_s += pause_s
            with contextlib.suppress(RateLimited):
                quotas.enter(Tenant(name, per_minute=6), pictures, f"job_{number}", 60)
                admitted[name] += pictures
        elapsed_s = clock.now_s - 1000
        assert max(admitted.values()) <= 6 + 6 * elapsed_s / 60 + 1e-6


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sampled_from("123"), st.integers(1, 9), st.floats(0, 5)),
        max_size=40,
    )
)
def test_the_sum_is_that_of_what_is_in_progress(events: list[tuple[str, str, int, float]]) -> None:
    counted, model = PicturesInProgress(), dict[str, tuple[str, int, float]]()
    now_s = 0.0
    for tenant, name, pictures, pause_s in events:
        now_s += pause_s
        model = {key: held for key, held in model.items() if held[2] > now_s}
        for each in "ab":
            assert counted.of(each, now_s) == sum(held[1] for held in model.values() if held[0] == each)
        assert all((key in counted) == (key in model) for key in "123")
        if name in model:
            counted.leave(name)
            del model[name]
        else:
            counted.enter(tenant, name, pictures, now_s + 6)
            model[name] = (tenant, pictures, now_s + 6)
