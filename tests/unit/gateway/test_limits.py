from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import ServiceUnavailable, TooManyRequests
from giornata_gateway.intake import limits
from giornata_gateway.intake.limits import Memory, Places


def test_rows_count_not_requests() -> None:
    admission = Places(4)
    with admission.held(1):
        with admission.held(3), pytest.raises(TooManyRequests), admission.held(1):
            pass
        with admission.held(2):
            assert admission.taken == 3
    assert admission.taken == 0


def test_one_edit_larger_than_the_limit_fits_into_an_idle_gateway() -> None:
    admission = Places(2)
    with admission.held(10):
        assert admission.taken == 10
        with pytest.raises(TooManyRequests), admission.held(1):
            pass


def test_a_check_takes_nothing_and_refuses_what_would_be_refused() -> None:
    admission = Places(2, "event streams")
    with admission.held(1):
        admission.check()
        assert admission.taken == 1
        with pytest.raises(TooManyRequests, match="2 event streams at a time"):
            admission.check(2)


def test_a_closed_gateway_admits_nothing() -> None:
    admission = Places(2)
    admission.closed = True
    with pytest.raises(ServiceUnavailable), admission.held(1):
        pass


def test_retry_after_follows_how_long_edits_take() -> None:
    admission = Places(2)
    quick = admission.estimate_s(4, 2)
    for _ in range(30):
        with admission.held(1) as stay:
            stay.seconds = 20
    assert admission.estimate_s(4, 2) > quick >= 1
    assert admission.estimate_s(4, 2) == pytest.approx(40, abs=1)
    with admission.held(2), pytest.raises(TooManyRequests) as refused:
        admission.check(4)
    assert refused.value.retry_after_s == admission.estimate_s(4, 2)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=40))
def test_never_above_the_limit_but_for_one_alone(limit: int, requests: list[tuple[int, bool]]) -> None:
    admission = Places(limit)
    held: list[tuple[int, ExitStack]] = []
    for rows, leaves in requests:
        with suppress(TooManyRequests), ExitStack() as stack:
            stack.enter_context(admission.held(rows))
            held.append((rows, stack.pop_all()))
        if leaves and held:
            held.pop(0)[1].close()
        assert admission.taken == sum(rows for rows, _ in held)
        assert admission.taken <= limit or len(held) == 1


def test_what_grows_is_refused_above_the_limit_and_given_back() -> None:
    held = Memory(100)
    with held.growing() as first, held.growing() as second:
        first(60)
        second(40)
        with pytest.raises(TooManyRequests) as refused:
            second(1)
        assert refused.value.retry_after_s
    assert held.held_bytes == 0


async def test_answers_wait_for_room_in_the_order_in_which_they_came() -> None:
    held = Memory(100)
    told: list[str] = []

    async def answer(name: str, size: int) -> None:
        async with held.room(size):
            told.append(name)

    async with asyncio.TaskGroup() as tasks, held.room(60):
        for name, size in (("large", 80), ("small", 10)):
            tasks.create_task(answer(name, size))
            await asyncio.sleep(0)
        assert told == []
    assert told == ["large", "small"]
    assert held.held_bytes == 0


async def test_one_above_the_limit_is_held_alone() -> None:
    held = Memory(100)
    async with held.room(500):
        assert held.held_bytes == 500


async def test_no_room_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ROOM_S", 0.01)
    held = Memory(100)
    async with held.room(60):
        with pytest.raises(ServiceUnavailable):
            await held.room(60).__aenter__()
    async with held.room(100):
        assert held.held_bytes == 100
