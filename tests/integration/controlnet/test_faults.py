"""What denoisers notice when a service stops, or dies, in the middle of a step."""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from structlog.testing import capture_logs

from giornata.control.link.messages import ControlFailed, LinkLost
from giornata.wire import subjects
from giornata.wire.errors import ControlNetUnavailable, InternalError
from giornata.wire.workers import ServiceName, ServiceState
from tests.forked_programs import program
from tests.integration.controlnet.bench import Bench, Denoiser, samples, shapes
from tests.patience import HUNG_S


@asynccontextmanager
async def process(bench: Bench, log: Path) -> AsyncIterator[tuple[Any, Denoiser]]:
    """A service as a process, once it is ready, and a denoiser that asks it."""
    instance = f"controlnet-{secrets.token_hex(3)}"
    states: asyncio.Queue[ServiceState] = asyncio.Queue()
    subject = subjects.telemetry(ServiceName.CONTROLNET, instance)
    env = {
        "GIORNATA_NATS_URL": bench.urls[0],
        "GIORNATA_BLOBS_URL": bench.urls[1],
        "GIORNATA_CONTROLNETS": bench.configured,
        "GIORNATA_DRAIN_S": "600",
    }
    flags = ("--instance", instance, "--device", "cpu")
    async with (
        bench.bus.listen(subject, ServiceState, states.put_nowait),
        program("giornata_controlnet", *flags, env=env, log=log) as started,
    ):
        async with asyncio.timeout(HUNG_S):
            assert (await states.get()).ready, "it tells nothing before it listens"
        yield started, Denoiser(bench.bus, bench.blobs, instance, bench.links)


async def test_a_killed_service_is_noticed_in_the_middle_of_a_step(bench: Bench, tmp_path: Path) -> None:
    async with process(bench, tmp_path / "log") as (started, denoiser):
        row = await denoiser.open(bench.use("edges"))
        expected = row.expected(bench.nets, 0)
        right = shapes(expected)
        found = samples(denoiser.step(row, 0, right), len(right))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        started.send_signal(signal.SIGSTOP)  # so that the step is not over before the end
        async with asyncio.timeout(HUNG_S):
            while psutil.Process(started.pid).status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
        asked = denoiser.step(row, 1, right)
        started.kill()
        with pytest.raises(LinkLost):
            await asyncio.to_thread(asked.sample, 0, HUNG_S)


async def test_a_service_that_stops_finishes_its_rows_and_takes_no_more(bench: Bench, tmp_path: Path) -> None:
    async with process(bench, tmp_path / "log") as (started, denoiser):
        row = await denoiser.open(bench.use("edges"))
        expected = row.expected(bench.nets, 2)
        right = shapes(expected)
        samples(denoiser.step(row, 0, right), len(right))
        draining = asyncio.Event()

        def hear(state: ServiceState) -> None:
            if state.draining:
                draining.set()

        subject = subjects.telemetry(ServiceName.CONTROLNET, denoiser.instance)
        async with bench.bus.listen(subject, ServiceState, hear):
            started.send_signal(signal.SIGTERM)
            async with asyncio.timeout(HUNG_S):
                await draining.wait()
        with pytest.raises(ControlNetUnavailable, match="is stopping"):
            await denoiser.open(bench.use("edges"))
        assert await denoiser.ask(row.request) == row.opened, "what is open stays open"
        found = samples(denoiser.step(row, 2, right), len(right))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert await denoiser.close(row)
        async with asyncio.timeout(HUNG_S):
            assert await started.wait() == 0


async def test_rows_that_do_not_end_in_time_lose_their_link(bench: Bench) -> None:
    async with bench.service(drain_s=0) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        right = shapes(row.expected(bench.nets, 0))
        running.gate.hold()
        asked = denoiser.step(row, 0, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        waits = denoiser.step(row, 1, right)
        running.stop.set()

        def lose() -> None:  # the service waits for the running forward, and the loop for the service
            with pytest.raises(LinkLost):
                waits.sample(0, HUNG_S)
            running.gate.permits.release(100)

        await asyncio.to_thread(lose)
        asked.release()
        async with asyncio.timeout(HUNG_S):
            await asyncio.wait([running.ended])


async def test_a_lost_device_ends_the_service(bench: Bench) -> None:
    async with bench.service() as running:
        running.may_fail = True
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        running.gate.error = torch.AcceleratorError("the device is gone", 1)
        asked = denoiser.step(row, 0, shapes(row.expected(bench.nets, 0)))
        with pytest.raises(LinkLost):
            await asyncio.to_thread(asked.sample, 0, HUNG_S)
        with pytest.raises(ExceptionGroup) as raised:
            await running.ended
    assert raised.group_contains(InternalError, match="lost their device")


async def test_where_memory_runs_out_fewer_steps_share_a_forward(bench: Bench) -> None:
    async with bench.service() as running:
        denoiser = bench.denoiser(running)
        rows = [await denoiser.open(bench.use("edges")) for _ in range(5)]
        expected = [row.expected(bench.nets, 0) for row in rows]
        right = shapes(expected[0])
        running.gate.most = 2
        running.gate.hold()
        blocking = denoiser.step(rows[0], 1, right)
        assert running.gate.began.acquire(timeout=HUNG_S)
        asked = [denoiser.step(row, 0, right) for row in rows[1:]]
        denoiser.reach(rows[0])
        running.gate.permits.release(100)
        samples(blocking, len(right))
        for one, other in zip(asked, expected[1:], strict=True):
            torch.testing.assert_close(samples(one, len(right)), other, atol=1e-6, rtol=0)
        running.gate.most = 0
        with (
            capture_logs(),  # to render the traceback takes seconds
            pytest.raises(ControlFailed) as raised,
            denoiser.step(rows[0], 0, right) as alone,
        ):
            alone.sample(0, HUNG_S)
        assert raised.value.code == "controlnet_out_of_memory"
    assert [count for _, count in running.gate.forwards] == [1, 4, 2, 2, 1]
