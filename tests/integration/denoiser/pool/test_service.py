"""A denoiser of two devices behind real NATS, as it is started: its rows equal one device's, and it drains."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.planning.cost_model import StepParallelism
from giornata.wire import subjects
from giornata.wire.adapters import ControlUse
from giornata.wire.messages import RunAnswer
from giornata.wire.workers import RankPhase, ServiceName, ServiceState
from giornata_denoiser.__main__ import serve
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.config import DenoiserConfig
from tests.integration.denoiser.bench import WAIT_S, Bench, Worker, taken
from tests.integration.denoiser.pool.bench import TOLERANCE, Model
from tests.integration.denoiser.test_remote_controls import instance
from tests.integration.denoiser.test_service_adapters import controlled, loaded
from tests.present import present


@pytest.fixture
def checkpoint(model: Model) -> Checkpoint:
    return model.checkpoint


@asynccontextmanager
async def pooled(bench: Bench, model: Model, **options: Any) -> AsyncIterator[Worker]:
    """The service itself, on two devices."""
    config = DenoiserConfig(
        **{
            **model.config(2).model_dump(exclude_unset=True),
            "nats_url": bench.urls[0],
            "blobs_url": bench.urls[1],
            "instance": f"denoiser-{secrets.token_hex(3)}",
            "served_name": "tiny",
            "telemetry_hz": 20,
            **options,
        }
    )
    stop = asyncio.Event()
    subject = subjects.telemetry(ServiceName.DENOISER, config.instance)
    async with bench.bus.listen(subject, ServiceState, bench.states.put_nowait):
        task = asyncio.create_task(serve(config, stop))
        try:
            state = await asyncio.wait_for(bench.states.get(), WAIT_S)
            assert state.worker is not None
            assert [rank.phase for rank in state.worker.ranks] == [RankPhase.READY] * 2
            assert {StepParallelism(told.degree, told.halves) for told in present(state.worker.cost_model).degrees} == {
                StepParallelism(2), StepParallelism(3), StepParallelism(4),
            }  # fmt: skip
            yield Worker(config.instance, None, stop, task)  # type: ignore[arg-type]  # its network is elsewhere
        finally:
            stop.set()
            await asyncio.wait([task])
        task.result()


async def test_edits_are_served_as_one_device_serves_them_and_a_drained_row_goes_on_elsewhere(
    bench: Bench, model: Model
) -> None:
    steps = 200
    asked: list[dict[str, Any]] = [{"n": 2, "reuse": "off"}, {"painted": [0], "reuse": "off", "seed": 3}]
    latents = []
    async with pooled(bench, model, template_policy="inline", drain_s=0) as pool:
        requests = [await bench.job(pool, **each) for each in asked]
        for request in requests:
            assert await bench.run(pool, request) is RunAnswer.ACCEPTED
        events = [await bench.report() for _ in requests]
        assert {event.job_id for event in events} == {request.job.job_id for request in requests}
        assert not any(event.handed_back for event in events)
        latents += [await bench.latents(request) for request in requests]
        assert await bench.edited(pool, reuse="strict") == 1, (
            "from a template, which one device records first"
        )
        told = [bench.states.get_nowait() for _ in range(bench.states.qsize())]
        assert {each.degree for state in told if state.worker for each in state.worker.samples} == {1, 2}
        drained = await bench.job(pool, steps=steps)
        await bench.run(pool, drained)
        while (step := await bench.step()).job_id != drained.job.job_id:
            pass
        assert step.step == 1
        pool.stop.set()
        assert (await bench.report()).handed_back
    record = await bench.records.get(drained.job.job_id)
    (row,) = record.rows
    assert 1 <= present(row.resume).step < steps
    async with bench.worker() as one:
        for each, found in zip(asked, latents, strict=True):
            request = await bench.job(one, **each)
            await bench.run(one, request)
            await bench.report()
            for latent, wanted in zip(found, await bench.latents(request), strict=True):
                torch.testing.assert_close(latent, wanted, atol=TOLERANCE, rtol=0)
        await bench.records.change(record.job.job_id, lambda r: taken(r, 2, one.instance))
        await bench.run(one, drained.model_copy(update={"attempt": 2, "rows": record.pending_rows}))
        assert not (await bench.report()).handed_back
        (resumed,) = await bench.latents(drained)
        whole = await bench.job(one, steps=steps)
        await bench.run(one, whole)
        await bench.report()
        (uninterrupted,) = await bench.latents(whole)
    torch.testing.assert_close(resumed, uninterrupted, atol=TOLERANCE, rtol=0)


async def test_a_pool_asks_the_service_for_a_controlnet_that_none_of_its_devices_has(
    bench: Bench, model: Model, tmp_path: Path
) -> None:
    use = ControlUse(model="edges", digest=loaded(bench, tmp_path).card.digest, scale=0.8)
    async with bench.worker() as one:
        here = await bench.computed(one, await controlled(bench, await bench.job(one), use))
    while not bench.states.empty():
        bench.states.get_nowait()
    bench.checkpoint = replace(bench.checkpoint, controlnets={})
    async with instance(bench, tmp_path, "c1") as gate, pooled(bench, model) as pool:
        there = await bench.computed(pool, await controlled(bench, await bench.job(pool), use))
        assert gate.forwards
    torch.testing.assert_close(there, here, atol=TOLERANCE, rtol=0)
