"""The process pool: what it runs, what it survives, what it leaves behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import TypeVar, TypeVarTuple

import numpy as np
import psutil
import pytest
import pytest_asyncio
from pebble.common.types import CONSTS
from PIL import Image

from giornata.families import Family
from giornata.wire.errors import ImageTimeout, ImageUnreadable, InternalError, TooManyPixels
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata_prepost import worker_pools
from giornata_prepost.images.pictures import decode
from giornata_prepost.images.stages import PixelLimits, finish, inspect
from giornata_prepost.worker_pools import ImagePool
from tests.patience import HUNG_S

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

LIMITS = PixelLimits(1_000_000, 64 * 64)
pytestmark = pytest.mark.asyncio(loop_scope="module")


class UnpicklableError(Exception):
    """Rebuilding it needs an argument that pickle does not know."""

    def __init__(self, *, needed: str) -> None:
        super().__init__(needed)


def process_id() -> int:
    return os.getpid()


def heavy_modules() -> list[str]:
    return sorted({"torch", "diffusers", "transformers", "nats", "aiohttp"} & set(sys.modules))


def add(one: int, other: int) -> int:
    return one + other


def hang(seconds: float, stubborn: bool, begun: Path | None = None) -> None:
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if begun is not None:
        begun.touch()
    time.sleep(seconds)


def compute() -> None:
    while True:
        pass


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def die(log: Path, deaths: int) -> int:
    """Crash the first `deaths` times; return how often it was tried."""
    with log.open("a") as file:
        file.write("x")
    tries = len(log.read_text())
    if tries <= deaths:
        os.kill(os.getpid(), signal.SIGSEGV)
    return tries


def fail() -> None:
    raise UnpicklableError(needed="x")


def refuse() -> None:
    raise TooManyPixels("Too large.", field="image", received=7, accepted="at most 5", retry_after_s=1.5)


async def result_of(
    pool: ImagePool, function: Callable[[*Arguments], Result], *args: *Arguments, limit_s: float
) -> Result:
    result, _ = await pool.timed(function, *args, limit_s=limit_s)
    return result


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[ImagePool]:
    """One that outlives what each test does to its process."""
    async with ImagePool(processes=1) as pool:
        yield pool


async def test_results_come_back_and_processes_are_kept(pool: ImagePool) -> None:
    assert await result_of(pool, add, 2, 3, limit_s=HUNG_S) == 5
    first, second = (
        await result_of(pool, process_id, limit_s=HUNG_S),
        await result_of(pool, process_id, limit_s=HUNG_S),
    )
    assert first == second != os.getpid()


async def test_both_stages_run_without_torch(pool: ImagePool) -> None:
    target = BytesIO()
    Image.fromarray(np.full((70, 90, 3), 99, np.uint8)).save(target, "PNG")
    card = ModelCard(
        name="m", family=Family.FLUX_FILL, digest="d", vae_scale_factor=8, latent_channels=16,
        max_text_tokens=48, takes_guidance=True, takes_true_cfg=False, default_steps=4,
        default_guidance_scale=30.0, default_strength=1.0,
    )  # fmt: skip
    parameters = EditParameters(prompt="a hat")
    result = await result_of(pool, inspect, target.getvalue(), None, parameters, card, LIMITS, limit_s=HUNG_S)
    painted = np.full((result.measures.model_height, result.measures.model_width, 3), 7, np.uint8)
    answer = await result_of(
        pool, finish, target.getvalue(), result.alpha, parameters, LIMITS, painted, limit_s=HUNG_S
    )
    assert (decode(answer, 10_000).pixels == 7).all()
    assert await result_of(pool, heavy_modules, limit_s=HUNG_S) == []


async def test_errors_of_the_tree_come_back_whole(pool: ImagePool) -> None:
    with pytest.raises(TooManyPixels) as caught:
        await result_of(pool, refuse, limit_s=HUNG_S)
    error = caught.value
    assert (error.code, error.message, error.field) == ("too_many_pixels", "Too large.", "image")
    assert (error.received, error.accepted, error.retry_after_s) == ("7", "at most 5", 1.5)
    with pytest.raises(ImageUnreadable):
        await result_of(pool, decode, b"\x89PNG\r\n\x1a\n", 5, limit_s=HUNG_S)


async def test_any_other_error_is_an_internal_one(pool: ImagePool) -> None:
    with pytest.raises(InternalError):
        await result_of(pool, fail, limit_s=HUNG_S)
    assert await result_of(pool, add, 1, 1, limit_s=HUNG_S) == 2


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that this machine lets wait for the processor does not stand still."""
    monkeypatch.setattr(worker_pools, "STANDSTILL", 10 * HUNG_S)


@pytest.mark.usefixtures("unhurried")
async def test_a_task_that_takes_too_long_loses_its_process(pool: ImagePool) -> None:
    before = await result_of(pool, process_id, limit_s=HUNG_S)
    with pytest.raises(ImageTimeout) as caught:
        await result_of(pool, compute, limit_s=0.2)
    assert caught.value.received == "more than 0.2 s"
    assert not psutil.pid_exists(before)
    assert await result_of(pool, process_id, limit_s=HUNG_S) != before


async def test_standing_still_is_no_fault_of_the_picture(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the whole machine is stopped: the work's own time has not gone by."""
    monkeypatch.setattr(CONSTS, "term_timeout", 0.1)  # how long a process may ignore that it is asked to end
    before = await result_of(pool, process_id, limit_s=HUNG_S)
    with pytest.raises(InternalError, match="stood still"):
        await result_of(pool, hang, 600.0, True, limit_s=0.05)
    assert not psutil.pid_exists(before)
    assert await result_of(pool, process_id, limit_s=HUNG_S) != before


@pytest.mark.usefixtures("unhurried")
async def test_a_slow_machine_takes_no_time_from_a_picture(pool: ImagePool) -> None:
    assert await result_of(pool, nap, 0.5, limit_s=0.3) == 0.5


async def test_a_cancelled_task_loses_its_process(pool: ImagePool, tmp_path: Path) -> None:
    before, begun = await result_of(pool, process_id, limit_s=HUNG_S), tmp_path / "begun"
    running = asyncio.ensure_future(result_of(pool, hang, 600.0, False, begun, limit_s=600))
    async with asyncio.timeout(HUNG_S):
        while not begun.exists():  # noqa: ASYNC110 - another process tells
            await asyncio.sleep(0.02)
    running.cancel()
    await asyncio.wait([running])
    assert await result_of(pool, process_id, limit_s=HUNG_S) != before


async def test_a_crash_fails_its_own_task_only_and_is_not_worth_another_instance(tmp_path: Path) -> None:
    log = tmp_path / "tries"
    async with ImagePool(processes=2) as pool:
        tasks = [result_of(pool, add, i, i, limit_s=HUNG_S) for i in range(20)]
        crash = result_of(pool, die, log, 100, limit_s=HUNG_S)
        first, *others = await asyncio.gather(crash, *tasks, return_exceptions=True)
        assert isinstance(first, ImageUnreadable)
        assert not first.retryable
        assert len(log.read_text()) == 2
        assert others == [2 * i for i in range(20)]


async def test_work_whose_process_is_killed_once_is_done_again(pool: ImagePool, tmp_path: Path) -> None:
    assert await result_of(pool, die, tmp_path / "tries", 1, limit_s=HUNG_S) == 2


async def test_the_pool_survives_the_death_of_an_idle_process(pool: ImagePool) -> None:
    for _ in range(2):
        process = psutil.Process(await result_of(pool, process_id, limit_s=HUNG_S))
        process.kill()
        assert await result_of(pool, add, 1, 2, limit_s=HUNG_S) == 3


class Slow(int):
    """Pickling it takes until it may go on: the thread that hands out tasks waits with it."""

    begun, may_go_on = threading.Event(), threading.Event()

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        self.begun.set()
        self.may_go_on.wait(HUNG_S)
        return int, (int(self),)


async def test_work_that_waits_in_a_pool_that_breaks_is_not_forgotten(
    pool: ImagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pools, "FORGOTTEN_S", 0.1)
    process, slow = psutil.Process(await result_of(pool, process_id, limit_s=HUNG_S)), Slow(4)
    first = asyncio.ensure_future(result_of(pool, add, slow, 1, limit_s=HUNG_S))
    await asyncio.to_thread(slow.begun.wait, HUNG_S)
    waiting = asyncio.ensure_future(result_of(pool, add, 1, 2, limit_s=HUNG_S))
    await asyncio.sleep(0)
    process.kill()
    async with asyncio.timeout(HUNG_S):
        assert await waiting == 3
        slow.may_go_on.set()
        assert await first == 5


async def test_no_process_is_left_and_nobody_waits_forever() -> None:
    async with ImagePool(processes=2) as pool:
        workers = {await result_of(pool, process_id, limit_s=HUNG_S) for _ in range(4)}
        waiting = asyncio.ensure_future(result_of(pool, hang, 600.0, False, limit_s=600))
        await result_of(pool, add, 1, 1, limit_s=HUNG_S)
    assert not any(psutil.pid_exists(worker) for worker in workers)
    with pytest.raises(asyncio.CancelledError):
        await waiting


OWNER = """
import asyncio, os
from giornata_prepost.worker_pools import ImagePool
async def main():
    async with ImagePool(processes=2) as pool:
        print((await pool.timed(os.getpid, limit_s=240))[0], flush=True)
        await asyncio.Event().wait()
if __name__ == "__main__":
    asyncio.run(main())
"""


async def test_processes_end_with_an_owner_that_was_killed(tmp_path: Path) -> None:
    script = tmp_path / "owner.py"
    script.write_text(OWNER, encoding="utf-8")
    owner = await asyncio.create_subprocess_exec(sys.executable, script, stdout=asyncio.subprocess.PIPE)
    assert owner.stdout is not None
    try:
        worker = int(await owner.stdout.readline())
        family = [psutil.Process(worker), *psutil.Process(owner.pid).children(recursive=True)]
    finally:
        owner.kill()
        await owner.wait()
    gone, alive = psutil.wait_procs(family, timeout=HUNG_S)
    assert not alive
    assert gone
