"""What denoisers notice when a service stops, or loses its device, in the middle of a step."""

from __future__ import annotations

import asyncio

import pytest
import torch
from structlog.testing import capture_logs

from giornata.control.link.messages import ControlFailed, LinkLost
from giornata.wire.errors import ControlNetUnavailable, InternalError
from tests.integration.controlnet.bench import Bench, samples, shapes
from tests.patience import HUNG_S


async def test_a_service_that_stops_finishes_its_rows_and_takes_no_more(bench: Bench) -> None:
    async with bench.service(drain_s=600) as running:
        denoiser = bench.denoiser(running)
        row = await denoiser.open(bench.use("edges"))
        expected = row.expected(bench.nets, 2)
        right = shapes(expected)
        samples(denoiser.step(row, 0, right), len(right))
        running.stop.set()
        async with asyncio.timeout(HUNG_S):
            while not (await running.states.get()).draining:
                pass
        with pytest.raises(ControlNetUnavailable, match="is stopping"):
            await denoiser.open(bench.use("edges"))
        assert await denoiser.ask(row.request) == row.opened, "what is open stays open"
        found = samples(denoiser.step(row, 2, right), len(right))
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        assert await denoiser.close(row)
        async with asyncio.timeout(HUNG_S):
            await running.ended


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
