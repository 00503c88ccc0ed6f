"""The denoiser behind real NATS: it takes rows, tells of them once, and reports what it measured."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest
import safetensors.torch
import torch
from PIL import Image

from giornata import tensors
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.errors import InternalError, ServiceUnavailable
from giornata.wire.messages import PREVIEW_BYTES, CancelRows, Epoch, RunAnswer
from giornata.wire.workers import HostDevice, StepSample
from tests.fakes.profiles import PROFILE
from tests.forked_programs import program
from tests.integration.denoiser.bench import GRID, STEPS, WAIT_S, Bench, taken
from tests.patience import HUNG_S
from tests.present import present


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


# Rows that are cancelled, replaced, lost, poisoned, handed back or late; and devices that fail.


@pytest.mark.parametrize("broadcast", [False, True])
async def test_a_cancelled_attempt_is_dropped_without_a_report(bench: Bench, broadcast: bool) -> None:
    async with bench.worker(permits=1, capacity_rows=1) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        assert (await bench.step()).step == 1
        job_id = request.job.job_id
        if broadcast:
            await bench.bus.publish(subjects.cancel(job_id), CancelRows(job_id=job_id, attempt=0))
        else:
            other = CancelRows(job_id=job_id, attempt=9)
            await bench.bus.publish(subjects.worker(worker.instance, "cancel"), other)
            await bench.bus.publish(
                subjects.worker(worker.instance, "cancel"), CancelRows(job_id=job_id, attempt=1)
            )
        await bench.idle()
        next_job = await bench.job(worker)
        assert await bench.run(worker, next_job) is RunAnswer.ACCEPTED
        worker.network.permits.release(1000)
        assert (await bench.report()).job_id == next_job.job.job_id
        (assignment,) = (await bench.records.get(job_id)).assignments
        assert assignment.worker == worker.instance  # the router's to close


async def test_a_router_that_was_superseded_is_not_obeyed(bench: Bench) -> None:
    """The epoch of each message counts, whatever the message is; without one, the sender is a gateway or older."""
    old, new = Epoch(1, 3), Epoch(1, 5)
    async with bench.worker(permits=1, capacity_rows=2) as worker:
        kept, late = await bench.job(worker), await bench.job(worker)
        assert await bench.run(worker, kept.model_copy(update={"epoch": new})) is RunAnswer.ACCEPTED
        assert (await bench.step()).step == 1
        stale = late.model_copy(update={"epoch": old})
        assert await bench.run(worker, stale) is RunAnswer.STALE
        subject = subjects.worker(worker.instance, "cancel")
        await bench.bus.publish(subject, CancelRows(job_id=kept.job.job_id, attempt=1, epoch=old))
        assert await bench.run(worker, stale) is RunAnswer.STALE, "by now the cancel was heard"
        worker.network.permits.release(1000)
        assert (await bench.report()).job_id == kept.job.job_id
        assert await bench.run(worker, late) is RunAnswer.ACCEPTED
        assert (await bench.report()).job_id == late.job.job_id


async def test_lost_inputs_and_poison_fail_the_row_with_their_code(bench: Bench) -> None:
    async with bench.worker() as worker:
        lost = await bench.job(worker)
        await bench.blobs.delete(lost.encoding.rows[0])
        await bench.run(worker, lost)
        await bench.report()
        (row,) = (await bench.records.get(lost.job.job_id)).rows
        assert row.error is not None
        assert (row.error.code, row.error.field) == ("intermediate_lost", "encoding")

        poisoned = await bench.job(worker, n=2)
        bad = tensors.unpack(await bench.blobs.get(poisoned.encoding.rows[1]))
        bad["noise"][0, 0] = float("nan")
        ref = await bench.blobs.put("bad", tensors.pack(bad), HUNG_S)
        encoding = poisoned.encoding.model_copy(update={"rows": (poisoned.encoding.rows[0], ref)})
        await bench.run(worker, poisoned.model_copy(update={"encoding": encoding}))
        await bench.report()
        good, failed = (await bench.records.get(poisoned.job.job_id)).rows
        assert good.latents is not None
        assert good.error is None
        assert present(failed.error).code == "row_poisoned"


async def test_draining_finishes_what_it_can_in_time(bench: Bench) -> None:
    async with bench.worker(permits=1) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        await bench.step()
        worker.stop.set()
        other = await bench.job(worker)
        assert await bench.run(worker, other) is RunAnswer.DRAINING
        worker.network.permits.release(1000)
        assert not (await bench.report()).handed_back


@pytest.mark.parametrize("forget", [False, True])
async def test_a_drained_row_goes_on_elsewhere_as_if_nothing_had_happened(bench: Bench, forget: bool) -> None:
    async with bench.worker(permits=2, drain_s=0) as first:
        request = await bench.job(first)
        await bench.run(first, request)
        assert [(await bench.step()).step for _ in range(2)] == [1, 2]
        first.stop.set()
        assert (await bench.report()).handed_back
    record = await bench.records.get(request.job.job_id)
    (row,) = record.rows
    assert row.worker is None
    assert row.resume is not None
    assert row.resume.step == 2
    if forget:  # a lost latent only means to begin again
        await bench.blobs.delete(row.resume.latents)
    async with bench.worker() as second:
        await bench.records.change(record.job.job_id, lambda r: taken(r, 2, second.instance))
        await bench.run(second, request.model_copy(update={"attempt": 2, "rows": record.pending_rows}))
        assert not (await bench.report()).handed_back
        (resumed,) = await bench.latents(request)
        whole = await bench.job(second)
        await bench.run(second, whole)
        await bench.report()
        (uninterrupted,) = await bench.latents(whole)
    assert not await bench.blobs.has(row.resume.latents)  # the row has gone on from there
    torch.testing.assert_close(resumed, uninterrupted, atol=1e-5, rtol=0)
    expected = STEPS if forget else STEPS - 2
    assert [(await bench.step()).attempt for _ in range(expected)] == [2] * expected


async def test_a_row_that_gives_way_is_handed_back_as_it_is_and_the_worker_goes_on(bench: Bench) -> None:
    async with bench.worker(permits=2) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        assert [(await bench.step()).step for _ in range(2)] == [1, 2]
        message = CancelRows(job_id=request.job.job_id, attempt=1, hand_back=True)
        await bench.bus.publish(subjects.worker(worker.instance, "cancel"), message)
        assert (await bench.report()).handed_back
        (row,) = (await bench.records.get(request.job.job_id)).rows
        assert row.worker is None
        assert present(row.resume).step == 2
        worker.network.permits.release(1000)
        await bench.records.change(request.job.job_id, lambda r: taken(r, 2, worker.instance))
        await bench.run(worker, request.model_copy(update={"attempt": 2, "rows": (row,)}))
        assert not (await bench.report()).handed_back


async def test_time_that_is_over_ends_the_assignment(bench: Bench) -> None:
    async with bench.worker(permits=1) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request.model_copy(update={"remaining_ms": 1000}))
        await bench.idle()
        assert bench.denoised.empty()


async def test_a_lost_device_ends_the_process_with_an_error(bench: Bench) -> None:
    async with bench.worker(permits=0) as worker:
        worker.may_fail = True
        worker.network.lost = True
        await bench.run(worker, await bench.job(worker))
        worker.network.permits.release(1)
        assert worker.ended is not None
        await asyncio.wait([worker.ended], timeout=WAIT_S)
        with pytest.raises(ExceptionGroup) as group:
            worker.ended.result()
        assert group.group_contains(InternalError, match="lost its device")


async def test_a_process_whose_model_cannot_compute_never_serves(
    nats_url: str, redis_url: str, tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_checkpoint(Family.FLUX_INPAINT), tmp_path / "tiny")
    weights = tmp_path / "tiny" / "transformer" / "diffusion_pytorch_model.safetensors"
    spoilt = safetensors.torch.load_file(weights)
    spoilt["proj_out.weight"].fill_(torch.nan)
    safetensors.torch.save_file(spoilt, weights, metadata={"format": "pt"})
    flags = ("--model", str(tmp_path / "tiny"), "--device", "cpu")
    env, log = {"GIORNATA_NATS_URL": nats_url, "GIORNATA_BLOBS_URL": redis_url}, tmp_path / "log"
    async with program("giornata_denoiser", *flags, env=env, log=log) as process:
        assert await asyncio.wait_for(process.wait(), HUNG_S) == 1
    told = log.read_text()
    assert "cannot compute a picture" in told
    assert "Traceback" not in told
