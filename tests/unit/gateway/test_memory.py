from __future__ import annotations

import asyncio

import pytest

from giornata.wire.errors import ServiceUnavailable, TooManyRequests
from giornata_gateway.intake import memory
from giornata_gateway.intake.memory import Memory


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
    monkeypatch.setattr(memory, "ROOM_S", 0.01)
    held = Memory(100)
    async with held.room(60):
        with pytest.raises(ServiceUnavailable):
            await held.room(60).__aenter__()
    async with held.room(100):
        assert held.held_bytes == 100
