"""What the active router tells gateways of the fleet: its summary, reports of instances, and the steps of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest

from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import JobNotFound, MalformedMessage
from giornata.wire.messages import JobEstimate, JobEstimateRequest
from giornata.wire.workers import (
    FleetPage,
    FleetRequest,
    FleetSummary,
    InstanceReport,
    InstanceReports,
    ServiceName,
    ServiceState,
)
from giornata_router import fleet_reports
from tests.fakes.fleet import CARD
from tests.integration.router.bench import Bench, denoiser, make_job
from tests.patience import HUNG_MS, HUNG_S


async def page(bench: Bench, number: int) -> tuple[int, tuple[InstanceReport, ...]]:
    """How many pages there are, and the instances of one."""
    deadline = Deadline.after_ms(HUNG_MS)
    request = FleetRequest(page=number, remaining_ms=deadline.remaining_ms())
    told = await bench.bus.call(subjects.FLEET, request, FleetPage, deadline)
    return told.pages, codec.decode(InstanceReports, told.packed).reports


@asynccontextmanager
async def telemetry_of_workers(bench: Bench) -> AsyncIterator[asyncio.Queue[ServiceState]]:
    """What workers tell, since what the router tells follows it."""
    told: asyncio.Queue[ServiceState] = asyncio.Queue()
    subject = subjects.telemetry_of(ServiceName.DENOISER)
    async with bench.bus.listen(subject, ServiceState, told.put_nowait):
        yield told


async def test_a_change_is_told_at_once_and_no_change_now_and_then(
    bench: Bench, stack: AsyncExitStack
) -> None:
    told: asyncio.Queue[FleetSummary] = asyncio.Queue()
    await stack.enter_async_context(bench.bus.listen(subjects.SUMMARY, FleetSummary, told.put_nowait))
    async with asyncio.timeout(HUNG_S):
        while (await told.get()).ready.get(ServiceName.PREPOST) != 1:
            pass
        fake = await denoiser(stack, bench, "d1")
        while (summary := await told.get()).models != (CARD,):
            pass
        assert summary.ready[ServiceName.DENOISER] == 1
        while await told.get() != summary:
            pass
        assert await told.get() == summary, "it is told again, so that its absence means that no router leads"
        fake.die()
        while (await told.get()).models:
            pass


async def test_instances_are_reported_page_by_page(
    bench: Bench, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_reports, "PAGE", 1)
    fake = await denoiser(stack, bench, "d1")
    fake.going.clear()
    await bench.submit(make_job(n=2))
    async with asyncio.timeout(HUNG_S), telemetry_of_workers(bench) as told:
        pages, first = await page(bench, 0)
        while pages != 3 or not first[0].running_rows:
            await told.get()
            pages, first = await page(bench, 0)
    [second], [third] = [(await page(bench, number))[1] for number in (1, 2)]
    names = [report.state.service for report in (*first, second, third)]
    assert names == [ServiceName.DENOISER, ServiceName.PREPOST, ServiceName.ROUTER]
    worker = first[0].state.worker
    assert worker is not None
    assert (first[0].running_rows, worker.running, third.state.active) == (2, (), True)
    with pytest.raises(MalformedMessage, match="from 0 to 2"):
        await page(bench, 3)
    fake.going.set()


async def test_how_far_a_job_is_is_told_with_its_forecast(bench: Bench, stack: AsyncExitStack) -> None:
    fake = await denoiser(stack, bench, "d1")
    fake.going.clear()
    job = await bench.submitted(n=2)
    request = JobEstimateRequest(job_id=job.job_id, remaining_ms=HUNG_MS)
    forecast = JobEstimate()
    async with asyncio.timeout(HUNG_S), telemetry_of_workers(bench) as told:
        while not forecast.steps:
            await told.get()
            with suppress(JobNotFound):  # while no worker lists it
                deadline = Deadline.after_ms(HUNG_MS)
                forecast = await bench.bus.call(subjects.FORECAST, request, JobEstimate, deadline)
    assert forecast.steps == ((0, 0), (1, 0))
    fake.going.set()
    await bench.ended(job)
