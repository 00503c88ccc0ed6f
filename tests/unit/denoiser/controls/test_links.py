"""The data paths of a denoiser: whom making one holds up, who owns it, and the room that rows take of it."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import pytest
import torch

from giornata.control.link.listener import Listener
from giornata.control.link.losses import LinkLost
from giornata.wire.controlnets import DataPath, OpenControlReply
from giornata_denoiser.controls.instances import ControlDataPath, DataPathPool
from tests.patience import HUNG_S

CPU = torch.device("cpu")
SLAB_BYTES = 1 << 16


@dataclass
class Door:
    """A listener that admits denoisers once a test lets it."""

    folder: FilePath
    open: threading.Event = field(default_factory=threading.Event)
    knocked: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    left: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)

    @contextmanager
    def listening(self, name: str = "s") -> Iterator[OpenControlReply]:
        unix = self.folder / name
        with Listener(self._admits, lambda _: None, unix=unix, tcp=None, device=CPU, left=self.left.put):
            try:
                yield OpenControlReply(path=DataPath.UNIX, address=str(unix), token="t" * 8, behind=())
            finally:
                self.open.set()

    def _admits(self, _token: str) -> bool:
        self.knocked.release()
        return self.open.wait(HUNG_S)

    async def visited(self) -> None:
        assert await asyncio.to_thread(self.knocked.acquire, timeout=HUNG_S)

    async def empty(self) -> None:
        await asyncio.to_thread(self.left.get, timeout=HUNG_S)


@pytest.fixture
def door(tmp_path: FilePath) -> Door:
    return Door(tmp_path)


async def test_an_instance_that_does_not_admit_holds_up_no_other(door: Door, tmp_path: FilePath) -> None:
    free = Door(tmp_path / "free")
    free.folder.mkdir()
    free.open.set()
    links = DataPathPool(SLAB_BYTES, CPU)
    with door.listening() as held, free.listening() as opened:
        waiting = asyncio.create_task(links.to("held", held))
        await door.visited()
        async with asyncio.timeout(HUNG_S):
            await links.to("free", opened)
            await links.leave("free")
        assert not waiting.done()
        door.open.set()
        await asyncio.wait_for(waiting, HUNG_S)
        await links.close()


async def test_a_path_that_nobody_waits_for_any_longer_serves_the_next_row_and_is_closed(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    with door.listening() as opened:
        waiting = asyncio.create_task(links.to("c", opened))
        await door.visited()
        waiting.cancel()
        await asyncio.wait([waiting])
        door.open.set()
        async with asyncio.timeout(HUNG_S):
            path = await links.to("c", opened)
            assert door.knocked.acquire(blocking=False) is False, "it is the one that was being made"
            await links.close()
        assert path.link.lost
        await door.empty()


async def test_an_instance_that_was_started_again_leaves_no_lost_path_behind(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    door.open.set()
    with door.listening("before") as opened:
        before = await links.to("c", opened)
    await asyncio.to_thread(before.link._reader.join, HUNG_S)
    with door.listening("after") as opened:
        now = await links.to("c", opened)
        assert [task.result() for task in links._paths.values()] == [now]
        await links.close()


async def test_memory_that_is_not_to_be_had_is_a_loss() -> None:
    links = DataPathPool(1 << 60, CPU)
    with pytest.raises(LinkLost, match="no data path over tcp"):
        await links.to(
            "c", OpenControlReply(path=DataPath.TCP, address="127.0.0.1:1", token="t" * 8, behind=())
        )
    await links.close()


async def test_room_is_given_back_at_once_and_to_all_who_wait(door: Door) -> None:
    links = DataPathPool(SLAB_BYTES, CPU)
    door.open.set()
    with door.listening() as opened:
        path: ControlDataPath = await links.to("c", opened)
        await path.take(SLAB_BYTES)
        waiting = [asyncio.create_task(path.take(SLAB_BYTES // 2)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)
        path.give_back(SLAB_BYTES)
        await asyncio.wait(waiting[:2], timeout=HUNG_S)
        assert [task.done() for task in waiting] == [True, True, False]
        path.give_back(SLAB_BYTES // 2)
        await asyncio.wait_for(waiting[2], HUNG_S)
        await links.close()
