"""The denoiser on real NATS and a real blob store: it accepts, reports, cancels, and hands back when it drains."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import Tensor

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus import bus, streams
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.planning.batch import PlannerName
from giornata.records.jobs import Records
from giornata.wire import subjects
from giornata.wire.errors import InternalError, ServiceUnavailable
from giornata.wire.events import PREVIEW_BYTES, DenoisedEvent, PreviewEvent, StepEvent
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, JobRecord, JobState, Priority, Row
from giornata.wire.messages import CancelRows, RunAnswer, RunReply, RunRequest
from giornata.wire.models import Family
from giornata.wire.requests import EditParameters, resolve
from giornata.wire.workers import ServiceName, ServiceState, StepSample
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.flux.inpaint import FluxInpaint
from giornata_denoiser.service import Denoiser
from giornata_tools.model.random.build import build
from tests.fakes.profiles import PROFILE

GRID = (3, 4)
STEPS = 4
WAIT_S = 20.0
REF = BlobRef(key="none", size_bytes=0, sha256="")


def taken(record: JobRecord, attempt: int, worker: str, rows: Collection[int] = (0,)) -> JobRecord:
    """Some rows have been given to `worker`."""
    given = {"attempt": attempt, "worker": worker}
    changed = tuple(row.model_copy(update=given) if row.index in rows else row for row in record.rows)
    return record.model_copy(update={"attempt": attempt, "rows": changed})


class Gated(FluxInpaint):
    """Computes a step for every permit; loses its device on demand."""

    def __init__(self, transformer: Any, permits: int) -> None:
        super().__init__(transformer)
        self.permits = threading.Semaphore(permits)
        self.lost = False

    def model_input(self, latent: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        assert self.permits.acquire(timeout=WAIT_S)
        if self.lost:
            raise torch.AcceleratorError("the device is gone", 1)
        return super().model_input(latent, conditioning)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = tmp_path_factory.mktemp("models") / "tiny"
    build(Family.FLUX_INPAINT, folder)
    return open_checkpoint(DenoiserConfig(model=str(folder), device="cpu"))


@dataclass
class Bench:
    """A test's side of the conversation, and the workers it has started."""

    bus: Bus
    blobs: RedisBlobs
    records: Records
    checkpoint: Checkpoint
    urls: tuple[str, str]
    steps: asyncio.Queue[StepEvent] = field(default_factory=asyncio.Queue)
    previews: asyncio.Queue[PreviewEvent] = field(default_factory=asyncio.Queue)
    denoised: asyncio.Queue[DenoisedEvent] = field(default_factory=asyncio.Queue)
    states: asyncio.Queue[ServiceState] = field(default_factory=asyncio.Queue)

    @asynccontextmanager
    async def worker(self, *, permits: int = 1000, **options: Any) -> AsyncIterator[Worker]:
        family = Gated(self.checkpoint.family.transformer, permits)  # type: ignore[attr-defined]  # of the tiny checkpoint
        config = DenoiserConfig(
            model="tiny",
            nats_url=self.urls[0],
            redis_url=self.urls[1],
            instance=f"denoiser-{secrets.token_hex(3)}",
            telemetry_hz=20,
            **options,
        )
        denoiser = Denoiser(
            config,
            self.bus,
            self.blobs,
            self.records,
            replace(self.checkpoint, family=family),
            profile=PROFILE,
        )
        worker = Worker(config.instance, family, asyncio.Event())
        async with self.bus.listen(
            subjects.telemetry(ServiceName.DENOISER, config.instance), ServiceState, self.states.put_nowait
        ):
            task = asyncio.create_task(denoiser.run(worker.stop))
            worker.ended = task
            while (await asyncio.wait_for(self.states.get(), WAIT_S)).instance != config.instance:
                pass  # what an earlier worker said last
            try:
                yield worker
            finally:
                worker.stop.set()
                family.permits.release(1000)
                await asyncio.wait([task])
            if not worker.may_fail:
                task.result()

    async def job(
        self,
        worker: Worker,
        *,
        n: int = 1,
        steps: int = STEPS,
        tenant: str = "test",
        painted: Sequence[int] = (),
        **parameters: Any,
    ) -> RunRequest:
        """A job whose record says that `worker` has it, with random inputs; its mask touches the tokens `painted`."""
        card = self.checkpoint.card
        asked = EditParameters(
            prompt="a hat", n=n, num_inference_steps=steps, strength=1.0, guidance_scale=3.5, **parameters
        )
        job = Job(
            job_id=f"job-{secrets.token_hex(4)}",
            tenant=tenant,
            gateway="gateway-test",
            priority=Priority.INTERACTIVE,
            model=card.name,
            model_digest=card.digest,
            parameters=resolve(asked, card, 0),
            image=REF,
            budget_ms=60_000,
            result_ttl_s=60,
        )
        rows = tuple(Row(index=i, seed=i, attempt=1, worker=worker.instance) for i in range(n))
        encoding = await self._encoding(job.job_id, n, painted)
        record = JobRecord(job=job, state=JobState.RUNNING, attempt=1, rows=rows)
        assert await self.records.create(record)
        return RunRequest(
            job=job, attempt=1, inspection=INSPECTION, encoding=encoding, rows=rows, remaining_ms=60_000
        )

    async def _encoding(self, job_id: str, n: int, painted: Sequence[int]) -> Encoding:
        generator = torch.Generator().manual_seed(0)
        joint, pooled = self.checkpoint.family.prompt_channels
        text = {
            "prompt_embeds": torch.randn(6, joint, generator=generator),
            "pooled_prompt_embeds": torch.randn(pooled, generator=generator),
        }
        refs = []
        for index in range(n):
            channels = self.checkpoint.family.conditioning
            row = {name: torch.randn(12, width, generator=generator) for name, width in channels.items()}
            row["mask"] = (row["mask"] > 0).float()
            row["mask"][[token for token in range(12) if painted and token not in painted]] = 0
            refs.append(await self.blobs.put(f"{job_id}/row-{index}", tensors.pack(row), 60))
        text_ref = await self.blobs.put(f"{job_id}/text", tensors.pack(text), 60)
        empty = {name: torch.zeros_like(tensor) for name, tensor in text.items()}
        empty_ref = await self.blobs.put(f"{job_id}/empty-text", tensors.pack(empty), 60)
        return Encoding(text=text_ref, text_tokens=6, rows=tuple(refs), empty_text=empty_ref)

    async def edited(self, worker: Worker, **parameters: Any) -> int:
        """How many tokens an edit of the one template computed; its mask touches one of twelve."""
        asked = {"reuse": "auto", "halo": 0, **parameters}
        request = await self.job(worker, painted=[0], **asked)
        assert await self.run(worker, request) is RunAnswer.ACCEPTED
        await self.report()
        (row,) = (await self.records.get(request.job.job_id)).rows
        assert row.computed_tokens is not None
        return row.computed_tokens

    async def run(self, worker: Worker, request: RunRequest) -> RunAnswer:
        subject = subjects.worker_run(worker.instance)
        return (await self.bus.call(subject, request, RunReply, Deadline.after_ms(5000))).answer

    async def latents(self, request: RunRequest) -> list[Tensor]:
        record = await self.records.get(request.job.job_id)
        refs = [row.latents for row in record.rows]
        return [tensors.unpack(await self.blobs.get(ref))["latents"] for ref in refs if ref is not None]

    async def report(self) -> DenoisedEvent:
        return await asyncio.wait_for(self.denoised.get(), WAIT_S)

    async def step(self) -> StepEvent:
        return await asyncio.wait_for(self.steps.get(), WAIT_S)

    async def idle(self) -> None:
        """Until a worker's telemetry says that it has nothing."""
        while not self.states.empty():
            self.states.get_nowait()
        while True:
            state = await asyncio.wait_for(self.states.get(), WAIT_S)
            if state.worker is not None and not state.worker.running + state.worker.waiting:
                return


@dataclass
class Worker:
    instance: str
    family: Gated
    stop: asyncio.Event
    ended: asyncio.Task[None] | None = None
    may_fail: bool = False


INSPECTION = Inspection(
    width=64,
    height=48,
    has_alpha=False,
    model_width=16 * GRID[1],
    model_height=16 * GRID[0],
    output_width=64,
    output_height=48,
    tokens=12,
    compute_tokens=6,
    mask_ratio=0.5,
    template_key="t",
    prepared=REF,
)


@pytest.fixture
async def bench(nats_url: str, redis_url: str, checkpoint: Checkpoint) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        connected = await stack.enter_async_context(bus.connect(nats_url, "test"))
        blobs = await stack.enter_async_context(RedisBlobs.open(redis_url))
        await streams.ensure(connected.jetstream, replicas=1, events_ttl_s=60)
        made = Bench(
            connected, blobs, await Records.open(connected.jetstream), checkpoint, (nats_url, redis_url)
        )
        pattern = "giornata.event.gateway-test.*"
        await stack.enter_async_context(connected.listen(f"{pattern}.step", StepEvent, made.steps.put_nowait))
        await stack.enter_async_context(
            connected.listen(f"{pattern}.preview", PreviewEvent, made.previews.put_nowait)
        )
        await stack.enter_async_context(
            connected.listen(f"{pattern}.denoised", DenoisedEvent, made.denoised.put_nowait)
        )
        yield made


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
        assert first.shape == (12, bench.checkpoint.family.conditioning["noise"])
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
        worker.family.permits.release(1000)
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
        [row] = state.running
        assert (row.computed_tokens, row.text_tokens, row.sequences, row.begun) == (None, 6, 1, False)
        assert state.stepping_ms > 0, "its first step is held up"
        assert (state.capacity_rows, state.steps_total) == (1, 0)
        assert state.costs is not None
        assert state.costs.compute.weights == PROFILE.compute.weights
        assert (state.costs.blocks, state.costs.device) == (worker.family.blocks, PROFILE.device)
        worker.family.permits.release(1000)
        await bench.report()
        samples: list[StepSample] = []
        async with asyncio.timeout(WAIT_S):
            while len(samples) < 2 * STEPS:
                current = (await bench.states.get()).worker
                samples += current.samples if current else []
        assert {(s.rows, s.sequences, s.image_tokens, s.text_tokens) for s in samples} == {(1, 1, 12, 6)}


async def test_a_worker_without_room_says_full(bench: Bench) -> None:
    async with bench.worker(permits=0, capacity_rows=2) as worker:
        big = await bench.job(worker, n=3)
        assert await bench.run(worker, big) is RunAnswer.ACCEPTED  # an idle worker takes any job
        assert await bench.run(worker, await bench.job(worker)) is RunAnswer.FULL


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
            await bench.bus.publish(subjects.worker_cancel(worker.instance), other)
            await bench.bus.publish(
                subjects.worker_cancel(worker.instance), CancelRows(job_id=job_id, attempt=1)
            )
        await bench.idle()
        next_job = await bench.job(worker)
        assert await bench.run(worker, next_job) is RunAnswer.ACCEPTED
        worker.family.permits.release(1000)
        assert (await bench.report()).job_id == next_job.job.job_id
        (assignment,) = (await bench.records.get(job_id)).assignments
        assert assignment.worker == worker.instance  # the router's to close


async def test_a_newer_attempt_replaces_the_older(bench: Bench) -> None:
    async with bench.worker(permits=0, capacity_rows=2) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        await bench.records.change(request.job.job_id, lambda r: taken(r, 2, worker.instance))
        assert await bench.run(worker, request.model_copy(update={"attempt": 2})) is RunAnswer.ACCEPTED
        worker.family.permits.release(1000)
        assert (await bench.report()).attempt == 2
        await bench.idle()
        assert bench.denoised.empty()


async def test_two_attempts_at_different_rows_of_a_job_are_computed_side_by_side(bench: Bench) -> None:
    async with bench.worker(permits=0) as worker:
        both = await bench.job(worker, n=2)
        first, second = (both.model_copy(update={"rows": (row,)}) for row in both.rows)
        await bench.records.change(both.job.job_id, lambda r: taken(r, 2, worker.instance, {1}))
        assert await bench.run(worker, first) is RunAnswer.ACCEPTED
        assert await bench.run(worker, second.model_copy(update={"attempt": 2})) is RunAnswer.ACCEPTED
        worker.family.permits.release(1000)
        assert sorted([(await bench.report()).attempt, (await bench.report()).attempt]) == [1, 2]
        record = await bench.records.get(both.job.job_id)
        assert not record.assignments
        assert all(row.latents is not None for row in record.rows)


async def test_a_void_attempt_is_not_reported(bench: Bench) -> None:
    async with bench.worker(permits=0) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        await bench.records.change(request.job.job_id, lambda r: taken(r, 2, "another"))
        worker.family.permits.release(1000)
        for _ in range(STEPS):
            await bench.step()
        await bench.idle()
        record = await bench.records.get(request.job.job_id)
        assert (record.rows[0].worker, record.rows[0].latents) == ("another", None)
        assert bench.denoised.empty()


async def test_lost_inputs_and_poison_fail_the_row_with_their_code(bench: Bench) -> None:
    async with bench.worker() as worker:
        lost = await bench.job(worker)
        await bench.blobs.delete(lost.encoding.rows[0])
        await bench.run(worker, lost)
        await bench.report()
        (row,) = (await bench.records.get(lost.job.job_id)).rows
        assert row.error is not None
        assert row.error.code == "input_lost"

        poisoned = await bench.job(worker, n=2)
        bad = tensors.unpack(await bench.blobs.get(poisoned.encoding.rows[1]))
        bad["noise"][0, 0] = float("nan")
        ref = await bench.blobs.put("bad", tensors.pack(bad), 60)
        encoding = poisoned.encoding.model_copy(update={"rows": (poisoned.encoding.rows[0], ref)})
        await bench.run(worker, poisoned.model_copy(update={"encoding": encoding}))
        await bench.report()
        good, failed = (await bench.records.get(poisoned.job.job_id)).rows
        assert good.latents is not None
        assert good.error is None
        assert failed.error is not None
        assert failed.error.code == "row_poisoned"


async def test_draining_finishes_what_it_can_in_time(bench: Bench) -> None:
    async with bench.worker(permits=1) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request)
        await bench.step()
        worker.stop.set()
        other = await bench.job(worker)
        assert await bench.run(worker, other) is RunAnswer.DRAINING
        worker.family.permits.release(1000)
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
    torch.testing.assert_close(resumed, uninterrupted, atol=1e-5, rtol=0)
    expected = STEPS if forget else STEPS - 2
    assert [(await bench.step()).attempt for _ in range(expected)] == [2] * expected


async def test_another_version_of_the_model_is_refused(bench: Bench) -> None:
    async with bench.worker() as worker:
        request = await bench.job(worker)
        other = request.model_copy(update={"job": request.job.model_copy(update={"model_digest": "d" * 64})})
        with pytest.raises(ServiceUnavailable, match="another version of the model"):
            await bench.run(worker, other)


async def test_time_that_is_over_ends_the_assignment(bench: Bench) -> None:
    async with bench.worker(permits=1) as worker:
        request = await bench.job(worker)
        await bench.run(worker, request.model_copy(update={"remaining_ms": 300}))
        await bench.step()
        await bench.idle()
        assert bench.denoised.empty()


async def test_a_lost_device_ends_the_process_with_an_error(bench: Bench) -> None:
    async with bench.worker(permits=0) as worker:
        worker.may_fail = True
        worker.family.lost = True
        await bench.run(worker, await bench.job(worker))
        worker.family.permits.release(1)
        assert worker.ended is not None
        await asyncio.wait([worker.ended], timeout=WAIT_S)
        with pytest.raises(ExceptionGroup) as group:
            worker.ended.result()
        assert group.group_contains(InternalError, match="lost its device")


async def test_a_process_whose_model_cannot_compute_never_serves(
    nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    build(Family.FLUX_INPAINT, tmp_path / "tiny")
    weights = tmp_path / "tiny" / "transformer" / "diffusion_pytorch_model.safetensors"
    spoilt = safetensors.torch.load_file(weights)
    spoilt["proj_out.weight"].fill_(torch.nan)
    safetensors.torch.save_file(spoilt, weights, metadata={"format": "pt"})
    flags = ("--model", str(tmp_path / "tiny"), "--device", "cpu")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "giornata_denoiser", *flags),
        env={**os.environ, "GIORNATA_NATS_URL": nats_url, "GIORNATA_REDIS_URL": redis_url},
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 1
    assert "cannot compute a picture" in errors.decode()
    assert "Traceback" not in errors.decode()


async def test_edits_take_from_what_was_recorded_beside_an_earlier_one(bench: Bench) -> None:
    async with bench.worker(template_levels=3) as worker:
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
    async with bench.worker(template_policy="off", template_folder=tmp_path) as worker:
        assert await bench.edited(worker, reuse="strict") == 1
        assert await bench.edited(worker, reuse="auto") == 12


async def test_hit_and_miss_begin_from_the_same_noise(bench: Bench) -> None:
    async with bench.worker(template_policy="off") as worker:
        request = await bench.job(worker, reuse="auto", painted=[0], steps=2)
        await bench.run(worker, request)
        await bench.report()
        (missed,) = await bench.latents(request)
    options: dict[str, Any] = {"template_policy": "inline", "template_bits": 0, "template_correction": False}
    options["planner"] = PlannerName.KV  # whose choice follows no measured costs
    async with bench.worker(**options) as worker:
        request = await bench.job(worker, reuse="strict", painted=[0], steps=2)
        await bench.run(worker, request)
        await bench.report()
        (hit,) = await bench.latents(request)
    torch.testing.assert_close(hit[1:], missed[1:], atol=1e-5, rtol=0)  # outside, the template
    assert not torch.equal(hit[0], missed[0])  # the template run has the empty prompt
    assert (hit[0] - missed[0]).abs().max() < 0.5
