"""Rows that are opened at instances, opened again when they are lost, and closed whatever happens meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from pydantic import BaseModel
from structlog.testing import capture_logs

from giornata.bus.bus import Bus
from giornata.control.link import ControlFailed, slabs
from giornata.control.link.client import ControlLink
from giornata.control.link.server import Listener
from giornata.wire.controlnets import (
    CloseControl,
    CloseControlReply,
    DataPath,
    DeviceMemory,
    OpenControl,
    OpenControlReply,
    StepRefusal,
)
from giornata.wire.errors import ControlNetUnavailable
from giornata.wire.messages import RunRequest
from giornata_denoiser.controls import sessions as module
from giornata_denoiser.controls.residuals import OpenControls
from giornata_denoiser.controls.sessions import (
    ControlClientInfo,
    ControlNetInstances,
    ControlNetSessionManager,
    DataPathPool,
)
from tests.contract.messages import MESSAGES
from tests.patience import HUNG_S
from tests.unit.denoiser.controls.test_remote import BEHIND, CPU, NET, NETWORK, controlled_row
from tests.unit.scheduling.test_adapters import instance

SLAB_BYTES = 1 << 20
REQUEST = next(message for message in MESSAGES if isinstance(message, RunRequest))
ROW = controlled_row("j")
TOLD_OF_PATHS = {"controlnet_path_refused", "controlnet_linked"}


@dataclass
class Wire:
    """Instances' endpoints, each of which answers as a test says."""

    addresses: dict[DataPath, str]
    open: set[str] = field(default_factory=set)
    """Names of instances that have the row."""
    told: list[str] = field(default_factory=list)
    """What was asked of instances, in order of the answers."""
    heard: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    opens: asyncio.Event = field(default_factory=asyncio.Event)
    closes: asyncio.Event = field(default_factory=asyncio.Event)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def call(self, subject: str, asked: BaseModel, _reply: type, _deadline: object) -> BaseModel:
        name = subject.split(".")[-2]
        self.heard.release()
        if isinstance(asked, CloseControl):
            await self.closes.wait()
            self._note(f"close {name}")
            self.open.discard(name)
            return CloseControlReply(was_open=True)
        assert isinstance(asked, OpenControl)
        self.open.add(name)
        await self.opens.wait()
        path = next((path for path in asked.paths if path in self.addresses), None)
        if path is None:
            raise ControlNetUnavailable
        self._note(f"open {name}")
        return OpenControlReply(path=path, address=self.addresses[path], token="t" * 8, behind=(BEHIND,))

    def _note(self, what: str) -> None:
        self.told.append(what)
        self.news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(HUNG_S):
            while len(self.told) < count:
                self.news.clear()
                await self.news.wait()


@dataclass
class Bench:
    wire: Wire
    instances: ControlNetInstances
    sessions: ControlNetSessionManager
    opened: OpenControls[ControlLink]
    resumed: asyncio.Queue[str]

    async def asked(self) -> None:
        """Until the row's instance can be asked."""
        await asyncio.wait_for(self.resumed.get(), HUNG_S)
        assert self.opened.has(ROW.key)

    def lose(self, reason: Exception) -> None:
        self.opened.drop(ROW.key)
        self.sessions.lost(ROW.key, reason)


@asynccontextmanager
async def bench(
    folder: Path,
    paths: Sequence[DataPath] = (DataPath.UNIX,),
    device: torch.device = CPU,
) -> AsyncIterator[Bench]:
    unix = folder / "s"
    wire = Wire({DataPath.UNIX: str(unix)})
    wire.opens.set()
    wire.closes.set()
    instances, links, resumed = ControlNetInstances(), DataPathPool(SLAB_BYTES, CPU), asyncio.Queue[str]()
    asking = ControlClientInfo(NETWORK.base, "d", "m1", tuple(paths), torch.float32)
    with Listener(lambda _: True, lambda _: None, unix=unix, tcp=None, device=device):
        async with asyncio.TaskGroup() as tasks:
            sessions = ControlNetSessionManager(
                cast("Bus", wire),
                instances,
                links,
                asking,
                open_s=HUNG_S,
                resume=lambda job_id, _: resumed.put_nowait(job_id),
                tasks=tasks,
            )
            sessions.opened = OpenControls()
            yield Bench(wire, instances, sessions, sessions.opened, resumed)
        assert {each.free_bytes for each in links.made} <= {SLAB_BYTES}, "rows that have ended take no room"
        assert not wire.open, "instances that had the row are told that it has ended"
        assert not sessions.opened.has(ROW.key)
        await links.close()


def told(made: Bench, name: str) -> None:
    made.instances.hear(instance(name, frozenset({NET.digest})))


async def test_a_row_whose_attempt_ends_while_it_is_opened_is_closed(tmp_path: Path) -> None:
    async with bench(tmp_path) as made:
        told(made, "c1")
        made.wire.opens.clear()
        async with asyncio.timeout(HUNG_S), made.sessions.held(REQUEST, [ROW], fall_back=False):
            await made.wire.heard.acquire()
        await made.wire.until(1)
    assert made.wire.told == ["close c1"]
    assert not made.wire.open


async def test_a_row_is_opened_again_when_its_instance_has_closed_it(tmp_path: Path) -> None:
    """The other way round, the row that has just been opened would be closed."""
    async with bench(tmp_path) as made:
        told(made, "c1")
        async with made.sessions.held(REQUEST, [ROW], fall_back=False):
            await made.asked()
            made.wire.closes.clear()
            made.lose(ControlFailed(StepRefusal.ROW_UNKNOWN, "it was idle"))
            async with asyncio.timeout(HUNG_S):
                for _ in range(2):
                    await made.wire.heard.acquire()
            for _ in range(20):
                await asyncio.sleep(0)
            assert made.wire.told == ["open c1"], "it is not opened before it is closed"
            made.wire.closes.set()
            await made.asked()
            assert made.wire.open == {"c1"}
    assert made.wire.told == ["open c1", "close c1", "open c1", "close c1"]


async def test_a_row_that_has_been_open_is_not_told_that_its_controlnets_do_not_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOLD_S", 0.0)
    async with bench(tmp_path) as made:
        told(made, "c1")
        async with made.sessions.held(REQUEST, [ROW], fall_back=False) as failed:
            await made.asked()
            made.sessions.open_s = 0.1  # from now on: a busy machine would not have opened the row in time
            made.instances.hear(instance("c1", frozenset()))
            made.lose(ConnectionError("it is silent"))
            with pytest.raises(ControlNetUnavailable):
                await asyncio.wait_for(failed, HUNG_S)


async def test_a_data_path_that_cannot_be_had_gives_way_to_the_next_best(tmp_path: Path) -> None:
    paths = (DataPath.CUDA, DataPath.UNIX, DataPath.TCP)
    async with bench(tmp_path, paths) as made:
        made.wire.addresses = {DataPath.CUDA: str(tmp_path / "nobody"), **made.wire.addresses}
        told(made, "c1")
        async with made.sessions.held(REQUEST, [ROW], fall_back=False):
            await made.asked()
    assert made.wire.told == ["open c1", "open c1", "close c1"]


async def test_device_memory_that_cannot_be_opened_gives_way_to_the_socket_for_good_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As between containers without a common IPC namespace: each sees the device, and none the other's handles."""

    def shared(size_bytes: int, _device: torch.device) -> slabs.SharedSlab:
        made = DeviceMemory(
            device="GPU-1",
            handle=b"h",
            offset_bytes=0,
            counter=b"c",
            counter_offset=0,
            event=b"",
            event_sync=False,
        )
        return slabs.SharedSlab(torch.zeros(size_bytes, dtype=torch.uint8), device_memory=made)

    def refused(*_told: object) -> object:
        tried.append("opened")
        raise RuntimeError("CUDA error: invalid resource handle")

    tried: list[str] = []
    monkeypatch.setitem(slabs._MAKING, DataPath.CUDA, shared)
    monkeypatch.setattr(slabs.SharedSlab, "left", lambda _: None)
    monkeypatch.setattr(slabs, "_unique", lambda _: "GPU-1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refused)
    with capture_logs() as logs:
        async with bench(tmp_path, (DataPath.CUDA, DataPath.UNIX), device=torch.device("cuda:0")) as made:
            made.wire.addresses[DataPath.CUDA] = made.wire.addresses[DataPath.UNIX]
            told(made, "c1")
            for _ in range(2):
                async with made.sessions.held(REQUEST, [ROW], fall_back=False):
                    await made.asked()
    told_of = [
        (log["event"], log.get("path") or log["next"]) for log in logs if log["event"] in TOLD_OF_PATHS
    ]
    assert told_of == [("controlnet_path_refused", DataPath.UNIX), ("controlnet_linked", DataPath.UNIX)]
    reasons = [log.get("reason", "") + log.get("error", "") for log in logs]
    assert any("no data path over cuda to" in reason for reason in reasons)
    assert any("the device memory cannot be opened: CUDA error" in reason for reason in reasons)
    assert tried == ["opened"], "the second row takes the path that there is"
