"""The denoiser behind real NATS: it takes rows, tells of them once, and reports what it measured."""

from __future__ import annotations

import asyncio
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from giornata.wire.errors import ServiceUnavailable
from giornata.wire.messages import PREVIEW_BYTES, RunAnswer
from giornata.wire.workers import HostDevice, StepSample
from tests.fakes.profiles import PROFILE
from tests.integration.denoiser.bench import GRID, STEPS, WAIT_S, Bench


async def test_rows_are_computed_and_reported_once(bench: Bench) -> None:
    async with bench.worker() as worker:
        request = await bench.job(worker, n=2)
        assert await bench.run(worker, request) is RunAnswer.ACCEPTED
        event = await bench.report()
        steps = [await bench.step() for _ in range(2 * STEPS)]
        assert [(s.index, s.step) for s in steps] == [(i, s) for s in range(1, STEPS + 1) for i in range(2)]
        assert (event.job_id, event.attempt, event.worker) == (request.job.job_id, 1, worker.instance)
        assert not event.handed_back
        assert 0 < event.compute_ms <= event.denoise_ms
        assert event.wait_ms > 0
        record = await bench.records.get(request.job.job_id)
        assert not record.assignments
        first, second = await bench.latents(request)
        assert first.shape == (12, bench.checkpoint.family.network.conditioning["noise"])
        assert first.dtype is torch.float32
        assert not torch.equal(first, second)
        await bench.idle()
        assert bench.denoised.empty()


async def test_a_job_that_asks_is_shown_in_order_and_no_other_is(bench: Bench) -> None:
    async with bench.worker() as worker:
        await bench.run(worker, await bench.job(worker))
        await bench.report()
        asked = await bench.job(worker, n=2, steps=5, partial_images=2)
        await bench.run(worker, asked)
        told = [await asyncio.wait_for(bench.previews.get(), WAIT_S) for _ in range(4)]
        assert {(event.job_id, event.attempt, event.steps) for event in told} == {(asked.job.job_id, 1, 5)}
        assert [(e.index, e.step, e.partial_image_index) for e in told] == [
            (0, 2, 0), (1, 2, 0), (0, 3, 1), (1, 3, 1),
        ]  # fmt: skip
        for event in told:
            assert event.box == (0, 0, 64, 48)
            assert len(event.image) <= PREVIEW_BYTES
            with Image.open(BytesIO(event.image)) as picture:
                assert (picture.format, picture.size) == ("JPEG", (2 * GRID[1], 2 * GRID[0]))
        await bench.report()
        assert bench.previews.empty()


async def test_the_same_request_twice_is_computed_once(bench: Bench) -> None:
    async with bench.worker(permits=0) as worker:
        request = await bench.job(worker)
        assert await bench.run(worker, request) is RunAnswer.ACCEPTED
        assert await bench.run(worker, request) is RunAnswer.ACCEPTED
        worker.network.permits.release(1000)
        await bench.report()
        assert [(await bench.step()).step for _ in range(STEPS)] == [1, 2, 3, 4]
        await bench.idle()
        assert bench.steps.empty()


async def test_telemetry_lists_rows_from_acceptance_and_carries_samples(bench: Bench) -> None:
    async with bench.worker(permits=0, capacity_rows=1) as worker:
        request = await bench.job(worker, n=2)
        await bench.run(worker, request)
        async with asyncio.timeout(WAIT_S):
            while (state := (await bench.states.get()).worker) is not None and not state.running:
                assert {row.job_id for row in state.waiting} <= {request.job.job_id}
        assert state is not None
        assert [(row.index, row.step, row.steps, row.tokens) for row in state.running] == [(0, 0, STEPS, 12)]
        assert [row.index for row in state.waiting] == [1]
        assert state is not None
        [row] = state.running
        assert (row.computed_tokens, row.text_tokens, row.sequences, row.begun) == (None, 6, 1, False)
        assert state.stepping_ms > 0, "its first step is held up"
        assert (state.capacity_rows, state.steps_total) == (1, 0)
        assert state.cost_model is not None
        assert state.cost_model.compute.weights == PROFILE.compute.weights
        assert state.cost_model.device == PROFILE.device
        assert state.blocks in (None, bench.checkpoint.family.operations.specs)
        worker.network.permits.release(1000)
        await bench.report()
        samples: list[StepSample] = []
        async with asyncio.timeout(WAIT_S):
            while len(samples) < 2 * STEPS:
                current = (await bench.states.get()).worker
                samples += current.samples if current else []
        assert {(s.rows, s.sequences, s.image_tokens, s.text_tokens) for s in samples} == {(1, 1, 12, 6)}


@pytest.mark.parametrize(("reuse", "text"), [("auto", [6, 2, 6, 2]), ("off", [6] * STEPS)])
async def test_a_worker_keeps_padding_and_tells_so(bench: Bench, reuse: str, text: list[int]) -> None:
    """A miss renews it, in two steps of four."""
    async with bench.worker(permits=1, template_policy="off", reuse_text="padding") as worker:
        await bench.run(worker, await bench.job(worker, painted=[0], reuse=reuse))
        samples: list[StepSample] = []
        async with asyncio.timeout(WAIT_S):
            while not samples:
                state = (await bench.states.get()).worker
                samples += state.samples if state else []
        assert state is not None
        assert state.cost_model is not None
        assert state.cost_model.keeps_padding
        [row] = state.running
        assert (row.text_tokens, row.padding_tokens) == (6, 4 if reuse == "auto" else 0)
        worker.network.permits.release(1000)
        await bench.report()
        async with asyncio.timeout(WAIT_S):
            while len(samples) < STEPS:
                current = (await bench.states.get()).worker
                samples += current.samples if current else []
        assert [sample.text_tokens for sample in samples] == text


async def test_telemetry_tells_the_gpus_that_were_claimed(bench: Bench) -> None:
    bench.gpus = (HostDevice(device="cuda:3", id="GPU-3a"),)
    async with bench.worker():
        assert (await asyncio.wait_for(bench.states.get(), WAIT_S)).gpus == bench.gpus


async def test_another_version_of_the_model_is_refused(bench: Bench) -> None:
    async with bench.worker() as worker:
        request = await bench.job(worker)
        other = request.model_copy(update={"job": request.job.model_copy(update={"model_digest": "d" * 64})})
        with pytest.raises(ServiceUnavailable, match="another version of the model"):
            await bench.run(worker, other)


async def test_edits_take_from_what_was_recorded_beside_an_earlier_one(bench: Bench) -> None:
    async with bench.worker(template_levels=3, renew_steps=0) as worker:
        assert [await bench.edited(worker) for _ in range(2)] == [12, 12]
        async with asyncio.timeout(WAIT_S):
            while await bench.edited(worker) == 12:
                pass  # it is being recorded
        assert await bench.edited(worker, halo=1) == 4
        assert await bench.edited(worker, reuse="off") == 12
        assert await bench.edited(worker, tenant="another") == 12
        assert await bench.edited(worker, reuse="strict") == 12


async def test_a_template_may_be_recorded_before_its_first_edit_and_outlives_its_worker(
    bench: Bench, tmp_path: Path
) -> None:
    async with bench.worker(template_policy="inline", template_folder=tmp_path) as worker:
        assert await bench.edited(worker, reuse="strict") == 1
    async with bench.worker(template_policy="off", template_folder=tmp_path, renew_steps=0) as worker:
        assert await bench.edited(worker, reuse="strict") == 1
        assert await bench.edited(worker, reuse="auto") == 12
