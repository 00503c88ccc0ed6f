"""Rows whose ControlNets an instance of the service computes: equal to this process's, and what becomes of losses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from giornata.wire import subjects
from giornata.wire.adapters import ControlUse
from giornata.wire.jobs import JobState
from giornata.wire.messages import RunRequest
from giornata.wire.workers import ServiceName, ServiceState
from giornata_denoiser.choices import ControlNetExecutor
from giornata_denoiser.controls.sessions import ControlNetSessionManager
from tests.forked_programs import program
from tests.integration.controlnet import bench as controlnet
from tests.integration.controlnet.bench import Gate
from tests.integration.denoiser.bench import STEPS, Bench, Worker
from tests.integration.denoiser.test_service_adapters import controlled, loaded
from tests.patience import HUNG_S

ATOL = 1e-5


@pytest.fixture
def use(bench: Bench, folder: Path) -> ControlUse:
    """A net in a folder, which no denoiser has."""
    digest = loaded(bench, folder).card.digest
    bench.checkpoint = replace(bench.checkpoint, controlnets={})
    return ControlUse(model="edges", digest=digest, scale=0.8)


@asynccontextmanager
async def instance(bench: Bench, folder: Path, name: str, **options: Any) -> AsyncIterator[Gate]:
    """An instance in this process, whose forwards can be held."""
    nets = {"edges": str(folder / "edges")}
    with ExitStack() as links:
        served = controlnet.Bench(bench.bus, bench.blobs, bench.urls, nets, {}, links)
        async with served.service(instance=name, **options) as running:
            yield running.gate


async def heard(bench: Bench, name: str) -> ServiceState:
    """The next that an instance tells of itself."""
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    subject = subjects.telemetry(ServiceName.CONTROLNET, name)
    async with bench.bus.listen(subject, ServiceState, states.put_nowait):
        return await asyncio.wait_for(states.get(), HUNG_S)


@asynccontextmanager
async def quiet() -> AsyncIterator[None]:
    """What is broken is not logged: to render a traceback takes seconds."""
    with capture_logs():
        yield


async def alike(bench: Bench, worker: Worker, use: ControlUse, **asked: Any) -> RunRequest:
    """A job; all such jobs have equal inputs."""
    return await controlled(bench, await bench.job(worker, **asked), use)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the ControlNet of all these tests."""
    return tmp_path_factory.mktemp("nets")


@pytest.fixture(scope="module")
def pictures() -> dict[str, torch.Tensor]:
    """What :func:`made_here` has made, by what was asked."""
    return {}


async def made_here(
    bench: Bench, folder: Path, use: ControlUse, pictures: dict[str, torch.Tensor], **asked: Any
) -> torch.Tensor:
    """The picture of a denoiser that computes the net itself; jobs that ask alike have one picture."""
    if (known := pictures.get(repr(asked))) is not None:
        return known
    before = bench.checkpoint
    assert loaded(bench, folder).card.digest == use.digest
    async with bench.worker(control_executor=ControlNetExecutor.LOCAL) as worker:
        pictures[repr(asked)] = await bench.computed(worker, await alike(bench, worker, use, **asked))
    bench.checkpoint = before
    while not bench.steps.empty():
        bench.steps.get_nowait()
    return pictures[repr(asked)]


@pytest.mark.parametrize("asked", [{}, {"painted": [0, 1], "reuse": "auto", "halo": 0}])
async def test_a_picture_is_the_one_that_this_process_makes(
    bench: Bench, use: ControlUse, folder: Path, pictures: dict[str, torch.Tensor], asked: dict[str, Any]
) -> None:
    here = await made_here(bench, folder, use, pictures, **asked)
    async with instance(bench, folder, "c1") as gate, bench.worker() as worker:
        there = await bench.computed(worker, await alike(bench, worker, use, **asked))
        held = "painted" in asked
    torch.testing.assert_close(there, here, atol=ATOL, rtol=0)
    assert len(gate.forwards) == (STEPS // 2 if held else STEPS)


async def test_rows_of_one_step_are_asked_for_together(bench: Bench, use: ControlUse, folder: Path) -> None:
    async with instance(bench, folder, "c1") as gate, bench.worker() as worker:
        gate.hold()
        jobs = [await alike(bench, worker, use) for _ in range(3)]
        for request in jobs:
            await bench.run(worker, request)
        gate.permits.release(1000)
        for _ in jobs:
            await bench.report()
        pictures = [(await bench.latents(request))[0] for request in jobs]
    for picture in pictures[1:]:
        torch.testing.assert_close(picture, pictures[0], atol=ATOL, rtol=0)
    assert max(sequences for _, sequences in gate.forwards) > 1, "they shared forwards"


async def test_a_row_that_waits_for_an_instance_holds_up_nobody(
    bench: Bench, use: ControlUse, folder: Path, pictures: dict[str, torch.Tensor]
) -> None:
    here = await made_here(bench, folder, use, pictures)
    async with (
        instance(bench, folder, "full", control_rows=1),
        bench.worker() as other,
        bench.worker(control_open_s=HUNG_S) as worker,
    ):
        blocking = await alike(bench, other, use)
        other.network.permits = threading.Semaphore(0)
        await bench.run(other, blocking)
        async with asyncio.timeout(HUNG_S):
            while (await heard(bench, "full")).control.rows < 1:  # type: ignore[union-attr]  # an instance's
                pass
        waiting = await alike(bench, worker, use)
        await bench.run(worker, waiting)
        plain = await bench.job(worker)
        await bench.run(worker, plain)
        assert (await bench.report()).job_id == plain.job.job_id
        async with instance(bench, folder, "free"):
            assert (await bench.report()).job_id == waiting.job.job_id
            (there,) = await bench.latents(waiting)
        other.network.permits.release(1000)
        assert (await bench.report()).job_id == blocking.job.job_id
    torch.testing.assert_close(there, here, atol=ATOL, rtol=0)


async def test_a_killed_instance_is_replaced_by_another(
    bench: Bench, use: ControlUse, folder: Path, pictures: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    here = await made_here(bench, folder, use, pictures)
    given = {
        "GIORNATA_CONTROLNETS": f"edges={folder / 'edges'}",
        "GIORNATA_NATS_URL": bench.urls[0],
        "GIORNATA_BLOBS_URL": bench.urls[1],
    }
    flags = ("--instance", "killed", "--device", "cpu")
    async with program("giornata_controlnet", *flags, env=given, log=tmp_path / "log") as process:
        await heard(bench, "killed")
        async with bench.worker(permits=2, control_open_s=HUNG_S) as worker:
            request = await alike(bench, worker, use)
            await bench.run(worker, request)
            assert (await bench.step()).step == 1
            process.kill()
            await process.wait()
            async with instance(bench, folder, "other") as gate:
                worker.network.permits.release(1000)
                await bench.report()
                (there,) = await bench.latents(request)
        assert gate.forwards
    torch.testing.assert_close(there, here, atol=ATOL, rtol=0)


async def test_without_any_instance_left_the_row_is_handed_back_where_it_is(
    bench: Bench, use: ControlUse, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s = [float(HUNG_S)]  # for the first instance; for no other
    waiting = property(lambda _: waits_s[0], lambda *_: None)
    monkeypatch.setattr(ControlNetSessionManager, "_open_s", waiting, raising=False)
    async with bench.worker(control_late_s=HUNG_S) as worker:
        async with quiet(), instance(bench, folder, "only") as gate:
            gate.hold()
            gate.permits.release(1)
            request = await alike(bench, worker, use)
            await bench.run(worker, request)
            assert (await bench.step()).step == 1
            for _ in range(2):
                assert await asyncio.to_thread(gate.began.acquire, timeout=HUNG_S)
            waits_s[0] = 0.0
            gate.error = RuntimeError("the instance is broken")
        told = await bench.report()
        record = await bench.records.get(request.job.job_id)
    (row,) = record.rows
    assert told.handed_back
    assert (record.state, row.error) == (JobState.RUNNING, None), "the router tries again"
    assert row.resume is not None
    assert row.resume.step == 1


async def test_a_denoiser_that_has_the_net_goes_on_by_itself(
    bench: Bench, use: ControlUse, folder: Path, pictures: dict[str, torch.Tensor]
) -> None:
    here = await made_here(bench, folder, use, pictures, steps=12)
    loaded(bench, folder)
    async with bench.worker(control_open_s=5.0, control_executor=ControlNetExecutor.SERVICE) as worker:
        async with quiet(), instance(bench, folder, "only") as gate:
            async with asyncio.timeout(HUNG_S):
                while not gate.forwards:  # until it has heard of the instance
                    await bench.computed(worker, await alike(bench, worker, use, steps=12))
            while gate.began.acquire(blocking=False):
                pass
            worker.network.permits = threading.Semaphore(0)
            gate.hold()
            request = await alike(bench, worker, use, steps=12)
            await bench.run(worker, request)
            for _ in range(10):  # it begins by itself, and asks once the row is open
                worker.network.permits.release()
                if await asyncio.to_thread(gate.began.acquire, timeout=HUNG_S / 100):
                    break
            else:
                pytest.fail("the instance is never asked")
            gate.error = RuntimeError("the instance is broken")
            worker.network.permits.release(1000)
        await bench.report()
        (there,) = await bench.latents(request)
    torch.testing.assert_close(there, here, atol=ATOL, rtol=0)
