"""Rows that are cancelled, replaced, lost, poisoned, handed back or late; and devices that fail."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from giornata import tensors
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.errors import InternalError
from giornata.wire.messages import CancelRows, Epoch, RunAnswer
from tests.forked_programs import program
from tests.integration.denoiser.bench import STEPS, WAIT_S, Bench, taken
from tests.patience import HUNG_S
from tests.present import present


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
