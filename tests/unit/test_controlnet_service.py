"""A ControlNet service: its configuration, and which rows are open, to whom, and share a forward."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Any

import pytest

from giornata.config import load
from giornata.gpus import DeviceLedger
from giornata.runtime import memory_bytes
from giornata.wire.errors import ControlNetUnavailable, IntermediateLost, Overloaded
from giornata_controlnet.compute_thread import count_sharing
from giornata_controlnet.config import ControlNetConfig
from giornata_controlnet.rows import ActiveControlNet, OpenRow, OpenRowTable
from tests.contract.messages import BASE
from tests.patience import HUNG_S


def config(*flags: str) -> ControlNetConfig:
    return load(ControlNetConfig, "controlnet", ["--controlnets", "edges=/nets/edges", *flags])


def test_every_mistake_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GIORNATA_CONTROLNETS", raising=False)
    flags = [
        "--control-address",
        "here",
        "--control-memory-mb",
        "-1",
        "--control-socket",
        f"/{'x' * 80}",
        "--device",
        "tpu",
    ]
    with pytest.raises(SystemExit, match="2"):
        load(ControlNetConfig, "controlnet", flags)
    told = capsys.readouterr().err
    assert "5 configuration mistake(s)" in told
    for name in ("CONTROLNETS", "CONTROL_ADDRESS", "CONTROL_MEMORY_MB", "CONTROL_SOCKET", "DEVICE"):
        assert f"GIORNATA_{name} " in told


@pytest.mark.parametrize("controlnets", ["", " , ", "a=/x,a=/y", "../a=/x"])
def test_a_service_has_something_to_compute(controlnets: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        load(ControlNetConfig, "controlnet", ["--controlnets", controlnets])


def test_what_is_advertised_can_be_reached() -> None:
    assert config().tcp is None
    everywhere = config("--control-address", "0.0.0.0:9001")
    assert everywhere.tcp == ("0.0.0.0", 9001)  # noqa: S104 - compared, not bound
    assert everywhere.advertised("0.0.0.0:9001") == f"{socket.gethostname()}:9001"
    assert config("--control-address", "[::]:0").tcp == ("::", 0)
    assert config("--control-address", "10.0.0.7:1").advertised("10.0.0.7:1") == "10.0.0.7:1"
    assert config("--control-address", "[::1]:1").advertised("[::1]:1") == "[::1]:1"


def test_weights_take_half_of_the_memory_unless_they_are_told_how_much() -> None:
    assert config("--device", "cpu").budget_bytes(DeviceLedger()) == memory_bytes() // 2
    assert config("--control-memory-mb", "0").budget_bytes(DeviceLedger()) == 0
    assert config("--control-memory-mb", "3").budget_bytes(DeviceLedger()) == 3 << 20


# Which rows are open, and to whom; and which of their steps share a forward.


class Making:
    """Makes rows when it is let, and knows which have let go of their weights."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.let_go: list[str] = []
        self.went = asyncio.Event()
        self.begun = asyncio.Event()
        self.may = asyncio.Event()
        self.error: Exception | None = None

    def row(self, key: str, denoiser: str = "d1") -> OpenRow:
        pins = ExitStack()
        pins.callback(self.went.set)
        pins.callback(self.let_go.append, key)
        return OpenRow(key, denoiser, (), (), BASE, (3, 4), (1.0,), 1, None, pins)

    async def __call__(self) -> OpenRow:
        self.made.append("row")
        self.begun.set()
        await self.may.wait()
        if self.error is not None:
            raise self.error
        return self.row("a")


@pytest.fixture
def making() -> Making:
    return Making()


async def opened(rows: OpenRowTable, making: Making, key: str = "a", denoiser: str = "d1") -> OpenRow:
    async def make() -> OpenRow:
        return making.row(key, denoiser)

    return await rows.open(key, denoiser, make)


async def test_who_asks_for_a_row_that_is_being_opened_waits_for_it(making: Making) -> None:
    rows = OpenRowTable(4, 60)
    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
        first = tasks.create_task(rows.open("a", "d1", making))
        await making.begun.wait()
        second = tasks.create_task(rows.open("a", "d1", making))
        making.may.set()
    assert first.result() is second.result()
    assert making.made == ["row"]


async def test_an_opening_that_fails_leaves_the_place_to_the_next_one(making: Making) -> None:
    rows = OpenRowTable(1, 60)
    making.error = IntermediateLost()
    making.may.set()
    with pytest.raises(IntermediateLost):
        await rows.open("a", "d1", making)
    assert len(rows) == 0
    making.error = None
    assert (await rows.open("a", "d1", making)).key == "a"


async def test_a_row_that_is_closed_while_it_is_opened_lets_go_of_its_weights(making: Making) -> None:
    rows = OpenRowTable(4, 60)
    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:

        async def refused() -> None:
            with pytest.raises(ControlNetUnavailable, match="was closed while"):
                await rows.open("a", "d1", making)

        tasks.create_task(refused())
        await making.begun.wait()
        assert rows.close("a")
        making.may.set()
    assert making.let_go == ["a"]
    assert len(rows) == 0


async def test_rows_that_are_being_opened_count(making: Making) -> None:
    rows = OpenRowTable(1, 60)
    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(rows.open("a", "d1", making))
        await making.begun.wait()
        with pytest.raises(Overloaded):
            await opened(rows, making, "b")
        making.may.set()


async def test_a_row_answers_to_the_denoiser_that_opened_it(making: Making) -> None:
    rows = OpenRowTable(4, 60)
    own, other = rows.token("d1"), rows.token("d2")
    row = await opened(rows, making)
    assert rows.admits(own)
    assert rows.admits(other)
    assert not rows.admits("another")
    assert rows.find("a", own) is row
    assert rows.find("a", other) is None
    assert rows.find("b", own) is None
    taken = await opened(rows, making, "a", "d2")
    assert making.let_go == ["a"], "another denoiser has the row now"
    assert rows.find("a", other) is taken


async def test_a_denoiser_that_leaves_takes_its_rows_and_its_token(making: Making) -> None:
    rows = OpenRowTable(4, 60)
    token, kept = rows.token("d1"), rows.token("d2")
    await opened(rows, making)
    await opened(rows, making, "b", "d2")
    rows.leave(token)
    assert making.let_go == ["a"]
    assert not rows.admits(token)
    assert rows.find("b", kept) is not None
    assert rows.token("d1") != token


async def test_the_row_that_is_idle_longest_goes_first(making: Making) -> None:
    now = 0.0
    rows = OpenRowTable(4, 10, lambda: now)
    token = rows.token("d1")
    await opened(rows, making)
    await opened(rows, making, "b")
    now = 9
    assert rows.find("a", token) is not None, "which is a use"
    now = 10
    expiring = asyncio.create_task(rows.expire())
    await asyncio.wait_for(making.went.wait(), HUNG_S)
    expiring.cancel()
    assert making.let_go == ["b"]
    assert rows.find("a", token) is not None


async def test_a_drain_ends_with_the_last_row_and_takes_no_other(making: Making) -> None:
    rows = OpenRowTable(4, 60)
    await opened(rows, making)
    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as tasks:
        drained = tasks.create_task(rows.drained())
        await asyncio.sleep(0)
        with pytest.raises(ControlNetUnavailable, match="is stopping"):
            await opened(rows, making, "b")
        await opened(rows, making)  # it is open already
        assert not drained.done()
        rows.close("a")
    assert len(rows) == 0


@pytest.mark.parametrize(
    ("tokens", "limit", "count"),
    [([], 10, 0), ([4, 4, 4], 10, 2), ([4, 4, 4], 12, 3), ([30, 1], 10, 1), ([4, 30, 1], 10, 1)],
)
def test_steps_share_a_forward_up_to_a_limit_and_in_their_order(
    tokens: list[int], limit: int, count: int
) -> None:
    assert count_sharing(tokens, limit) == count


def test_a_step_counts_the_work_of_the_controlnets_that_act_in_it() -> None:
    act: Any = None  # nothing is computed
    nets = [ActiveControlNet(act, act, 1.0, (), 0, 2, 5.0), ActiveControlNet(act, act, 1.0, (), 1, 4, 3.0)]
    row = OpenRow("row", "denoiser", nets, (), BASE, (2, 3), (9.0, 5.0, 2.0, 1.0), 2, None, ExitStack())
    assert [row.work(step) for step in range(4)] == [5, 8, 3, 3]
