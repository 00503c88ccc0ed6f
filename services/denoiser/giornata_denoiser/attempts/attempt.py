"""An attempt at a job from acceptance to report: its rows, events and spans, its outcome, and the task that runs it."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from dataclasses import asdict, replace
from io import BytesIO
from typing import Any, Final, NamedTuple

import nats.errors
import numpy as np
import numpy.typing as npt
import structlog
from PIL import Image
from pydantic import BaseModel

from giornata import tensors
from giornata.blobs import BlobStore
from giornata.bus.bus import Bus
from giornata.deadlines import retry_patiently
from giornata.records import JobRecordStore
from giornata.scheduling.batch import RowKey
from giornata.tracing import NO_STEPS, SpanAttributes, StepSpans, span
from giornata.wire import subjects
from giornata.wire.errors import GiornataError, InternalError, JobNotFound, Overloaded, RowPoisoned
from giornata.wire.jobs import BlobRef, Job, JobRecord, RowState, TemplateUse
from giornata.wire.messages import (
    PREVIEW_BYTES,
    PREVIEW_JOB_BYTES,
    DenoisedEvent,
    Epoch,
    EventKind,
    PreviewEvent,
    RunAnswer,
    RunRequest,
    StepEvent,
)
from giornata.wire.requests import OutputFormat, Reuse
from giornata.wire.workers import RowProgress
from giornata_denoiser.engine.engine import RowEngine
from giornata_denoiser.engine.model_runner import RowPreview, StepReport
from giornata_denoiser.rows.row import Row

AttemptKey = tuple[str, int]
"""Job id and number of the attempt."""


def key_of(key: RowKey) -> AttemptKey:
    """The attempt that a row belongs to."""
    return key.job_id, key.attempt


class Attempt:
    """The rows of one attempt, and how far they are."""

    def __init__(self, request: RunRequest, accepted_s: float) -> None:
        self.request = request
        self.rows: dict[int, Row] = {}
        """By index, as of their last step; empty until their inputs are there."""
        self.errors: dict[int, GiornataError] = {}
        """By index: rows that failed."""
        self.compute_ms = 0.0
        """Sum of the steps that the rows took part in."""
        self.traced = NO_STEPS
        """Takes in the steps, where the attempt has a span."""
        self._accepted_s = self._ended_s = accepted_s
        within_ms = request.denoise_within_ms
        self.due_s = math.inf if within_ms is None else accepted_s + within_ms / 1e3
        """When the last of its rows is to have ended; infinite without a wish."""
        self._began_s: float | None = None
        self.task: asyncio.Task[None] | None = None
        """What carries it."""
        self.released = asyncio.Event()
        """Set when the engine is done with the rows, or will do no more for them."""

    def cancel(self) -> None:
        """Let go of it: it is void."""
        if self.task is not None:
            self.task.cancel()

    @property
    def key(self) -> AttemptKey:
        """Job id and number of the attempt."""
        return self.request.job.job_id, self.request.attempt

    @property
    def indices(self) -> frozenset[int]:
        """Indices of all its rows."""
        return frozenset(row.index for row in self.request.rows)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Indices of the rows that have neither a final latent nor an error."""
        ended = self.errors.keys() | {index for index, row in self.rows.items() if row.done}
        return tuple(row.index for row in self.request.rows if row.index not in ended)

    @property
    def wait_ms(self) -> float:
        """Time from acceptance to the first step."""
        return 0.0 if self._began_s is None else (self._began_s - self._accepted_s) * 1e3

    @property
    def denoise_ms(self) -> float:
        """Time from the first row's first step to the last row's last."""
        return 0.0 if self._began_s is None else (self._ended_s - self._began_s) * 1e3

    def advance(self, report: StepReport) -> tuple[Row, ...]:
        """Take in a step; returns the rows of this attempt that it advanced."""
        advanced = tuple(row for row in report.advanced if key_of(row.key) == self.key)
        failed = tuple(failure for failure in report.failed if key_of(failure.row.key) == self.key)
        if advanced or failed:
            self._began_s = report.began_s if self._began_s is None else self._began_s
            self._ended_s = report.ended_s
            self.compute_ms += (report.ended_s - report.began_s) * 1e3
        self.rows |= {row.key.index: row for row in advanced}
        self.errors |= {failure.row.key.index: failure.error for failure in failed}
        return advanced

    def fail(self, error: GiornataError) -> None:
        """End all unfinished rows with `error`."""
        self.errors |= dict.fromkeys(self.unfinished, error)

    def promised(self, row: Row) -> Row:
        """`row` with what an engine may have to know of its job."""
        job = self.request.job
        wishes = replace(row.wishes, due_s=self.due_s, priority=job.priority)
        return replace(row, wishes=wishes)

    def progress(self, now_s: float) -> Iterator[RowProgress]:
        """Rows for the telemetry: the unfinished ones, or all while the report is being written."""
        listed = self.unfinished or self.indices
        due_ms = None if math.isinf(self.due_s) else (self.due_s - now_s) * 1e3
        for asked in self.request.rows:
            if asked.index not in listed:
                continue
            row = self.rows.get(asked.index)
            resumed = asked.resume.step if asked.resume else 0
            shape: dict[str, Any] = {"encoded": row is not None}
            if row is not None:
                told = row.estimate
                shape |= {
                    "low_rank": told.low_rank,
                    "control": told.control,
                    "companion_tokens": told.companions,
                    "computed_tokens": told.computed if told.computed < told.image else None,
                    "text_tokens": told.text,
                    "padding_tokens": told.padding,
                    "prefix_tokens": told.prefix,
                    "sequences": told.sequences,
                    "begun": told.begun,
                    "renewed_every": row.reuse.renewed_every,
                    "skipped_steps": told.skipped,
                    "degree": row.degree,
                }
            yield RowProgress(
                job_id=self.request.job.job_id,
                attempt=self.request.attempt,
                index=asked.index,
                step=row.step if row else resumed,
                steps=row.steps if row else self.request.job.denoising_steps,
                tokens=self.request.inspection.tokens,
                due_ms=due_ms,
                **shape,
            )


def has_room(attempts: Collection[Attempt], rows: int, capacity_rows: int) -> bool:
    """Whether so many more rows may come; an idle worker takes any job, since a large one would find no worker else."""
    unfinished = sum(len(attempt.unfinished) for attempt in attempts)
    return unfinished == 0 or unfinished + rows <= capacity_rows


log = structlog.get_logger(__name__)


class AttemptResultWriter:
    """The edge to blob store and job records."""

    def __init__(self, blobs: BlobStore, records: JobRecordStore, worker: str) -> None:
        self._blobs, self._records, self._worker = blobs, records, worker

    async def write(self, attempt: Attempt) -> tuple[JobRecord, tuple[BlobRef, ...]]:
        """Write latents of finished rows, errors of failed ones, and where the others can go on.

        Returns the record, which shows whether the attempt still counted, and latents that it does not hold: of a state
        that a row has gone on from, or of an attempt that was void. Until the caller's time is over it tries again
        while NATS or the blob store does not answer.
        """
        stored = [row.resume.latents for row in attempt.request.rows if row.resume]
        changes: dict[int, dict[str, Any]] = {
            index: {"error": error.body()} for index, error in attempt.errors.items()
        }
        for index, row in attempt.rows.items():
            if index in changes or row.step == 0:
                continue
            try:
                latents = await self._put(attempt.request.job, row)
            except RowPoisoned as error:  # handed back before its last step was judged
                changes[index] = {"error": error.body()}
                continue
            stored.append(latents)
            loras_from = row.adapters.loras_from
            if not row.done:
                state = RowState(step=row.step, latents=latents, loras_from=loras_from)
                changes[index] = {"resume": state}
                continue
            changes[index] = {
                "latents": latents,
                "resume": None,
                "computed_tokens": row.computed_tokens,
                "template": template_use(attempt.request.job, row),
                "loras_from": loras_from if row.adapters.loras else None,
            }
        record = await self._change(attempt.request, changes)
        states = [row.resume.latents for row in record.rows if row.resume]
        held = {ref.key for ref in (*states, *[row.latents for row in record.rows if row.latents])}
        return record, tuple(ref for ref in stored if ref.key not in held)

    async def forget(self, latents: Sequence[BlobRef]) -> None:
        """Delete latents that no record holds any more. A failure is logged: they expire."""
        try:
            await self._blobs.delete(*latents)
        except GiornataError as error:
            log.warning("latents_not_forgotten", keys=[ref.key for ref in latents], error=str(error))

    @retry_patiently(Overloaded).wraps
    async def _put(self, job: Job, row: Row) -> BlobRef:
        """Keep a row's latents under a key that no other attempt has: for prepost now, or for any denoiser later."""
        data = await asyncio.to_thread(lambda: tensors.pack(row.export().tensors))
        key = f"{job.folder}latents-{row.key.index}-{secrets.token_hex(4)}"
        return await self._blobs.put(key, data, job.intermediate_ttl_s)

    @retry_patiently(nats.errors.Error).wraps
    async def _change(self, request: RunRequest, changes: Mapping[int, Mapping[str, Any]]) -> JobRecord:
        return await self._records.change(
            request.job.job_id,
            lambda record: record.freed(
                request.attempt, self._worker, lambda row: changes.get(row.index, {})
            ),
        )


def template_use(job: Job, row: Row) -> TemplateUse:
    """Return what a template did for a row."""
    if job.parameters.reuse is Reuse.OFF:
        return TemplateUse.OFF
    if row.reuse.template is not None:
        return TemplateUse.HIT
    return TemplateUse.SKIPPED if row.reuse.skipped else TemplateUse.MISS


FORMAT: Final = OutputFormat.JPEG
QUALITIES: Final = (85, 70, 50, 30, 15)
"""Tried in this order until a preview fits; then again with half as many pixels a side."""


def limit_bytes(job: Job) -> int:
    """Bytes that one preview of a job may have: all of them together keep to the job's share of the event stream."""
    asked = job.parameters.n * job.parameters.partial_images
    return min(PREVIEW_BYTES, PREVIEW_JOB_BYTES // max(1, asked))


def encode(pixels: npt.NDArray[np.uint8], limit: int) -> tuple[bytes, tuple[int, int]]:
    """`pixels`, (height, width, 3) RGB, as JPEG of at most `limit` bytes, and its width and height.

    Quality is given up first, then size.

    A pixel alone takes 700 bytes.

    Raises:
        ValueError: not even one pixel fits.
    """
    for picture, quality in _attempts(Image.fromarray(pixels)):
        target = BytesIO()
        picture.save(target, FORMAT.value, quality=quality, subsampling=0)
        if target.tell() <= limit:
            return target.getvalue(), picture.size
    raise ValueError(f"no preview fits into {limit} bytes")


def preview_event(request: RunRequest, preview: RowPreview) -> PreviewEvent:
    """The event that shows `preview`, a row of `request`. Encodes: call it away from the event loop."""
    image, size = encode(preview.pixels, limit_bytes(request.job))
    return PreviewEvent(
        job_id=preview.key.job_id,
        attempt=preview.key.attempt,
        index=preview.key.index,
        step=preview.step,
        steps=preview.steps,
        partial_image_index=preview.index,
        image=image,
        size=size,
        format=FORMAT,
        box=request.inspection.painted_box,
    )


def _attempts(picture: Image.Image) -> Iterator[tuple[Image.Image, int]]:
    while True:
        for quality in QUALITIES:
            yield picture, quality
        if max(picture.size) == 1:
            return
        picture = picture.resize([max(1, side // 2) for side in picture.size], Image.Resampling.BOX)


class EventPublisher:
    """Publishes the events of a denoiser's jobs."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._previews: asyncio.Queue[tuple[RunRequest, RowPreview]] = asyncio.Queue()

    def show(self, request: RunRequest, preview: RowPreview) -> None:
        """Have :meth:`shown` tell it when those before it are told."""
        self._previews.put_nowait((request, preview))

    async def shown(self) -> None:
        """Encode and tell previews, one at a time and in order; until it is cancelled."""
        while True:
            request, preview = await self._previews.get()
            try:
                event = await asyncio.to_thread(preview_event, request, preview)
                await self.publish(request.job, EventKind.PREVIEW, event)
            except Exception:  # the preview's edge: logged; the picture itself goes on
                log.exception("preview_lost", job=request.job.job_id, step=preview.step)

    async def publish(self, job: Job, kind: EventKind, event: BaseModel) -> None:
        """Events may be lost while NATS is away; the record is the truth."""
        try:
            await self._bus.publish(subjects.event(job.gateway, job.job_id, kind), event)
        except nats.errors.Error as error:
            log.warning("event_lost", job=job.job_id, kind=kind, error=repr(error))


@contextmanager
def denoise_span(attempt: Attempt) -> Iterator[None]:
    """The span of an attempt from its acceptance to its report; its steps are told below."""
    request = attempt.request
    with span(
        "denoise",
        job=request.job.job_id,
        attempt=request.attempt,
        rows=len(request.rows),
        mask_ratio=request.inspection.mask_ratio,
    ) as carrying:
        attempt.traced = carrying.steps()
        try:
            yield
        finally:
            attempt.traced.close()
            attempt.traced = NO_STEPS
            carrying.note(wait_ms=attempt.wait_ms, compute_ms=attempt.compute_ms)
            if attempt.rows:
                carrying.note(template=template_use(request.job, next(iter(attempt.rows.values()))).value)
            if attempt.errors:
                carrying.fail(next(iter(attempt.errors.values())).code)


def tell_step(steps: StepSpans, report: StepReport) -> None:
    """Tell a step that advanced rows of the attempt. Its sample is of the last step that is known to have ended."""
    now, sample = time.perf_counter(), report.sample
    told: SpanAttributes = {"batch_rows": len(report.advanced)}
    if sample is not None:
        told = {
            "batch_rows": sample.rows,
            "tokens": sample.image_tokens,
            "load_wait_ms": sample.waited_ms,
            "loaded_bytes": sample.loaded_bytes,
        }
    steps.add(now - report.began_s, now - report.ended_s, **told)


class EpochFence:
    """The highest epoch that this worker has heard of; a router of a lower one was superseded."""

    def __init__(self) -> None:
        self._highest: Epoch | None = None

    def admits(self, epoch: Epoch | None) -> bool:
        """Return whether a router of `epoch` is obeyed. None is one whose version sends no epoch: it always is."""
        if epoch is None:
            return True
        if self._highest is not None and epoch < self._highest:
            return False
        self._highest = epoch
        return True


class AttemptInputs(NamedTuple):
    """The inputs from which an attempt's rows are made."""

    rows: tuple[Row, ...]
    arriving: Awaitable[object]
    """Ends when all LoRAs of the rows have been loaded, or with the error of one that cannot be."""
    failed: asyncio.Future[None]
    """Has the error of a ControlNet that cannot be had, and never ends else."""


Fetch = Callable[[RunRequest], AbstractAsyncContextManager[AttemptInputs]]
"""Makes a request's rows, as `inputs.rows_of`, and keeps what they take from in memory."""
Publish = Callable[[Job, EventKind, BaseModel], Awaitable[None]]
"""Publishes an event of a job."""


class AttemptRunner:
    """The attempts that a worker has accepted, and the tasks that carry them.

    Only an idle worker takes more rows than `capacity_rows`. The engine runs already; `fetch` is entered while rows are
    computed.
    """

    def __init__(
        self,
        worker: str,
        *,
        capacity_rows: int,
        engine: RowEngine,
        fetch: Fetch,
        outcomes: AttemptResultWriter,
        publish: Publish,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._worker, self._capacity_rows, self._engine = worker, capacity_rows, engine
        self._fetch, self._outcomes, self._publish, self._tasks = fetch, outcomes, publish, tasks
        self._carried: dict[AttemptKey, Attempt] = {}
        self._draining = False

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt that is accepted and not yet reported."""
        return tuple(self._carried.values())

    def attempt_of(self, key: RowKey) -> Attempt | None:
        """The attempt that a row belongs to, if it is here."""
        return self._carried.get(key_of(key))

    def take(self, request: RunRequest) -> RunAnswer:
        """Return whether the rows can come; asked again, the answer is the same. What is taken starts at once."""
        attempt = Attempt(request, time.perf_counter())
        if attempt.key in self._carried:
            return RunAnswer.ACCEPTED
        if self._draining:
            return RunAnswer.DRAINING
        for other in self._of_job(request.job.job_id):
            if other.request.attempt < request.attempt and not attempt.indices.isdisjoint(other.indices):
                self.drop(other.key)
        if not has_room(self.attempts, len(request.rows), self._capacity_rows):
            return RunAnswer.FULL
        attempt.task = self._tasks.create_task(self._carry(attempt), name="attempt")
        attempt.task.add_done_callback(lambda _: self._forget(attempt))
        self._carried[attempt.key] = attempt
        return RunAnswer.ACCEPTED

    def drop(self, key: AttemptKey) -> None:
        """Forget an attempt that has been given to another worker, or whose job has ended."""
        attempt = self._carried.get(key)
        if attempt is not None:
            log.info("attempt_dropped", job=key[0], attempt=key[1])
            attempt.cancel()
            self._forget(attempt)

    def hand_back(self, key: AttemptKey) -> None:
        """Report the rows of an attempt as of their last step; those that are not in the engine yet go on."""
        attempt, rows = self._carried.get(key), self._engine.cancel(*key)
        if attempt is not None and rows:
            attempt.rows |= {row.key.index: row for row in rows}
            attempt.released.set()

    def drop_job(self, job_id: str) -> None:
        """Forget every attempt at a job that is cancelled."""
        for attempt in self._of_job(job_id):
            self.drop(attempt.key)

    async def advance(self, report: StepReport) -> None:
        """Tell what a step did, and release the attempts that it has finished."""
        for failure in report.failed:
            log.warning(
                "row_failed", key=failure.row.key, error=str(failure.error), exc_info=failure.error.__cause__
            )
        for attempt in self.attempts:
            advanced = attempt.advance(report)
            if attempt.traced is not NO_STEPS and advanced:
                tell_step(attempt.traced, report)
            for row in advanced:
                event = StepEvent(**asdict(row.key), step=row.step, steps=row.steps)
                await self._publish(attempt.request.job, EventKind.STEP, event)
            if attempt.rows and not attempt.unfinished:
                attempt.released.set()

    async def drain(self, limit_s: float, hand_back_s: float) -> None:
        """Take nothing more; finish within `limit_s`; hand back within `hand_back_s` what is not done by then."""
        self._draining = True
        await self._wait(limit_s)
        for row in self._engine.take_all():
            if (carried := self.attempt_of(row.key)) is not None:
                carried.rows[row.key.index] = row
        for attempt in self.attempts:
            attempt.released.set()
        await self._wait(hand_back_s)
        for attempt in self.attempts:
            attempt.cancel()

    def _of_job(self, job_id: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.request.job.job_id == job_id]

    async def _wait(self, limit_s: float) -> None:
        tasks = [attempt.task for attempt in self.attempts if attempt.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=limit_s)

    async def _carry(self, attempt: Attempt) -> None:
        request = attempt.request
        try:
            with denoise_span(attempt):
                async with asyncio.timeout(request.remaining_ms / 1000):
                    await self._compute(attempt)
                    handed_back = bool(attempt.unfinished)
                    with span("write outcome"):
                        record, superseded = await self._outcomes.write(attempt)
                await self._tell(attempt, record, handed_back=handed_back)
            await self._outcomes.forget(superseded)
        except TimeoutError:
            log.warning("attempt_out_of_time", job=request.job.job_id, attempt=request.attempt)
        except JobNotFound:
            log.warning("attempt_without_record", job=request.job.job_id, attempt=request.attempt)
        except Exception:  # the task's edge: logged; the router asks elsewhere for rows that no worker lists
            log.exception("attempt_failed", job=request.job.job_id, attempt=request.attempt)

    def _forget(self, attempt: Attempt) -> None:
        """Free the room of its rows. Called when it is dropped, and when its task has ended, begun or not."""
        if self.attempt_of(RowKey(*attempt.key, 0)) is attempt:
            self._engine.cancel(*attempt.key)
            del self._carried[attempt.key]

    async def _compute(self, attempt: Attempt) -> None:
        """Until every row has a latent or an error; rows that have neither are handed back."""
        job_id = attempt.request.job.job_id
        try:
            async with AsyncExitStack() as stack:
                with span("inputs"):
                    fetched = await stack.enter_async_context(self._fetch(attempt.request))
                rows = tuple(map(attempt.promised, fetched.rows))
                attempt.rows = {row.key.index: row for row in rows}
                if self._engine.submit(rows):
                    await self._released(attempt, fetched)
        except Overloaded as error:
            log.warning("inputs_unreachable", job=job_id, error=str(error))
        except GiornataError as error:
            attempt.fail(error)
        except Exception:  # the attempt's edge: logged and answered
            log.exception("inputs_failed", job=job_id)
            attempt.fail(InternalError())

    async def _released(self, attempt: Attempt, fetched: AttemptInputs) -> None:
        """Until the engine is done with its rows; those that wait for LoRAs go on once these have arrived.

        Raises:
            GiornataError: LoRAs cannot be loaded, or ControlNets are not to be had.
        """
        released = asyncio.create_task(attempt.released.wait(), name="released")
        loading = asyncio.ensure_future(fetched.arriving)
        waiting: set[asyncio.Future[Any]] = {released, loading, fetched.failed}
        try:
            while not released.done():
                ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if released in ended:
                    return
                for one in ended:
                    one.result()
                self._engine.resume(*attempt.key)
        finally:
            released.cancel()
            await asyncio.wait([released])

    async def _tell(self, attempt: Attempt, record: JobRecord, *, handed_back: bool) -> None:
        """The event that follows the record, unless the attempt is void."""
        job, number = attempt.request.job, attempt.request.attempt
        reported = any(row.attempt == number and row.index in attempt.indices for row in record.rows)
        if not reported or record.state.terminal:
            log.info("attempt_void", job=job.job_id, attempt=number)
            return
        event = DenoisedEvent(
            job_id=job.job_id,
            attempt=number,
            worker=self._worker,
            denoise_ms=attempt.denoise_ms,
            wait_ms=attempt.wait_ms,
            compute_ms=attempt.compute_ms,
            handed_back=handed_back,
        )
        await self._publish(job, EventKind.DENOISED, event)
