"""Rows that begin before their LoRAs are loaded: they join late, tell so, and migrate."""

from __future__ import annotations

import asyncio

import torch

from giornata.wire.adapters import AskedLora, LoraUse
from giornata.wire.messages import RunRequest
from giornata.wire.progress import RowRecord
from giornata.wire.workers import AdapterCounters
from tests.integration.denoiser.bench import STEPS, WAIT_S, Bench, Worker, taken
from tests.integration.denoiser.test_service_loras import Store, computed, stored, under

BOUND = 2


def bounded(store: Store) -> LoraUse:
    return store.use.model_copy(update={"joins_within": BOUND / STEPS})


async def begun(bench: Bench, worker: Worker, store: Store) -> RunRequest:
    """A job whose row has come to its bound and waits for its LoRA."""
    store.may_answer.clear()
    request = under(await bench.job(worker), bounded(store))
    await bench.run(worker, request)
    while (await bench.step()).step < BOUND:
        pass
    return request


async def row_of(bench: Bench, request: RunRequest) -> RowRecord:
    (row,) = (await bench.records.get(request.job.job_id)).rows
    return row


async def told(bench: Bench) -> AdapterCounters:
    """What a worker tells after now."""
    while not bench.states.empty():
        bench.states.get_nowait()
    await asyncio.wait_for(bench.states.get(), WAIT_S)
    state = await asyncio.wait_for(bench.states.get(), WAIT_S)
    assert state.worker is not None
    assert state.worker.adapters is not None
    return state.worker.adapters


async def test_a_bounded_row_makes_its_first_steps_and_tells_when_its_lora_joined(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        request = await begun(bench, worker, store)
        await computed(bench, worker, await bench.job(worker))  # others pass it at its bound
        store.may_answer.set()
        assert (await bench.report()).job_id == request.job.job_id
        assert (await row_of(bench, request)).loras_from == BOUND
        assert (await told(bench)).late == 1
        here = under(await bench.job(worker), bounded(store))
        exact = await computed(bench, worker, here)
        assert (await row_of(bench, here)).loras_from == 0, "what is loaded acts from the first step on"
        assert (await told(bench)).late == 1
        (late,) = await bench.latents(request)
        assert (late - exact).abs().max() > 1e-3


async def test_a_row_whose_request_tells_the_step_is_as_one_whose_lora_came_then(bench: Bench) -> None:
    async with stored(bench) as store, bench.worker() as worker:
        came = await begun(bench, worker, store)
        store.may_answer.set()
        await bench.report()
        counted = (await told(bench)).late
        request = under(await bench.job(worker), bounded(store))
        asked = {"loras": (AskedLora(id=f"lora_{'a' * 32}"),), "lora_join": BOUND / STEPS}
        parameters = request.job.parameters.model_copy(update=asked)
        job = request.job.model_copy(update={"parameters": parameters})
        forced = await computed(bench, worker, request.model_copy(update={"job": job}))
        assert (await row_of(bench, request)).loras_from == BOUND, "though it is loaded"
        assert (await told(bench)).late == counted, "it waited for nothing"
        (late,) = await bench.latents(came)
        torch.testing.assert_close(forced, late)


async def test_a_row_that_waits_at_its_bound_goes_on_elsewhere(bench: Bench) -> None:
    async with stored(bench) as store:
        async with bench.worker() as worker:
            stayed = await begun(bench, worker, store)
            store.may_answer.set()
            await bench.report()
        async with bench.worker(drain_s=0.1) as worker:
            request = await begun(bench, worker, store)
            worker.stop.set()
            assert (await bench.report()).handed_back
        row = await row_of(bench, request)
        assert row.resume is not None
        assert (row.resume.step, row.resume.loras_from) == (BOUND, BOUND)
        store.may_answer.set()
        async with bench.worker() as worker:
            record = await bench.records.change(request.job.job_id, lambda r: taken(r, 2, worker.instance))
            await bench.run(worker, request.model_copy(update={"attempt": 2, "rows": record.rows}))
            await bench.report()
        assert (await row_of(bench, request)).loras_from == BOUND
        torch.testing.assert_close(await bench.latents(request), await bench.latents(stayed))
