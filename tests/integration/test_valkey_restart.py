"""The blob store as the launcher starts it, killed under load: it forgets nothing that it has acknowledged."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from giornata.blobs import RedisBlobs
from giornata.wire.jobs import BlobRef
from giornata_tools.launcher.plan import socket_folder, valkey_command
from giornata_tools.launcher.process import StackProcess
from giornata_tools.launcher.warden import OrphanReaper
from tests.ending import MARK, marked
from tests.patience import HUNG_S

MB = 1 << 20


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short path, for the socket."""
    path = Path(tempfile.mkdtemp(prefix="gio-", dir=socket_folder()))
    yield path
    shutil.rmtree(path)


@asynccontextmanager
async def valkey(folder: Path) -> AsyncIterator[StackProcess]:
    """Up while inside; on leaving, killed where it lives."""
    with OrphanReaper() as warden:
        command = valkey_command(folder / "store", folder / "v.sock", os.environ)
        process = await StackProcess.start(command, folder, warden)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.attend())
            try:
                await process.announced(HUNG_S)
                yield process
            finally:
                process.kill()


async def test_what_was_acknowledged_is_there_after_a_kill(folder: Path) -> None:
    acknowledged: list[BlobRef] = []
    enough = asyncio.Event()

    async def write(blobs: RedisBlobs, writer: int) -> None:
        for number in range(60):  # until the server is gone
            data = os.urandom(16) * (MB // 16)
            acknowledged.append(await blobs.put(f"w{writer}/{number}", data, 600))
            if len(acknowledged) == 60:
                enough.set()

    async with valkey(folder) as first, RedisBlobs.open(f"unix://{folder / 'v.sock'}") as blobs:
        writers = [asyncio.create_task(write(blobs, writer)) for writer in range(3)]
        await enough.wait()
        first.kill()
        await first.ended.wait()
        before = len(acknowledged)
        waiting = asyncio.create_task(blobs.get(acknowledged[-1]))  # asked while it is away
        async with valkey(folder):
            assert len(await waiting) == MB
            await asyncio.gather(*writers)
            assert len(acknowledged) == 180 > before, "writers have waited and gone on"
            for ref in acknowledged:
                await blobs.get(ref)  # checks the sum, too


async def test_a_server_that_reads_its_file_is_waited_for(folder: Path) -> None:
    async with valkey(folder), RedisBlobs.open(f"unix://{folder / 'v.sock'}") as blobs:
        refs = [await blobs.put(f"b{number}", os.urandom(16) * (MB // 4), 600) for number in range(30)]
    command = valkey_command(folder / "store", folder / "v.sock", os.environ)
    with OrphanReaper() as warden:
        process = await StackProcess.start(command, folder, warden)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(process.attend())
            try:
                async with RedisBlobs.open(f"unix://{folder / 'v.sock'}") as blobs:  # not yet announced
                    for ref in refs:
                        await blobs.get(ref)
            finally:
                process.kill()


async def test_it_has_the_mark_of_its_run(folder: Path) -> None:
    """So that it ends with a run that is killed: see :mod:`tests.ending`."""
    async with valkey(folder) as process:
        assert process.pid in marked(f"{MARK}={os.environ[MARK]}")
