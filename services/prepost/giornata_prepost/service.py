"""Prepost's endpoints, and its telemetry.

Pictures go through the process pool, LoRAs through one of their own. The model works in one thread, one encoding or
decoding at a time.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import structlog
import torch
from pydantic import BaseModel

from giornata import tensors
from giornata.blobs import BlobStore, intermediate
from giornata.bus.bus import Bus, Endpoint, state_of, telemetry
from giornata.scratch import scratch_folder
from giornata.tracing import span
from giornata.wire import subjects
from giornata.wire.errors import InputLost, ServiceUnavailable
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job
from giornata.wire.loras import NormaliseLora
from giornata.wire.messages import (
    EncodeRequest,
    FinishReply,
    FinishRequest,
    InspectRequest,
    MaskRequest,
    Question,
    TemplateRequest,
    question,
)
from giornata.wire.models import Task
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.templates import TemplateInputs
from giornata.wire.values import Intermediate
from giornata.wire.workers import HostDevice, PrepostState, ServiceName, ServiceState
from giornata_prepost import encoding
from giornata_prepost.config import PrepostConfig
from giornata_prepost.encoding import EmptyPromptCache
from giornata_prepost.images.conditions import ModelCrop, control_images, prepare
from giornata_prepost.images.pictures import DecodedPicture, Pixels, Size, encode_as_asked
from giornata_prepost.images.stages import (
    ControlFiles,
    InspectedEdit,
    PixelLimits,
    finish,
    finish_regions,
    inspect,
    inspect_regions,
    inspect_template,
    measure_generation,
)
from giornata_prepost.loras.canonical import LoraNormaliser, TextLoraCache
from giornata_prepost.segmentation import SegmentationHandler, Segmenter, rehearse_segmenter
from giornata_prepost.worker_pools import CallPriority, ImagePool, LoraPool, ModelThread

if TYPE_CHECKING:
    from giornata_prepost.families.pipeline import ImageModel

Q = TypeVar("Q", bound=Question)
R = TypeVar("R", bound=BaseModel)

TEMPLATE_INPUTS_TTL_S: Final = 600
"""How long the inputs of a template run are kept; a worker reads them when it is asked to record."""

log = structlog.get_logger(__name__)


class Prepost:
    """One instance with one model, and a segmenter if masks from words are served; `gpus` are told."""

    def __init__(
        self,
        config: PrepostConfig,
        blobs: BlobStore,
        pool: ImagePool,
        model: ImageModel,
        *,
        gpus: Sequence[HostDevice] = (),
        segmenter: Segmenter | None = None,
    ) -> None:
        self._config, self._blobs, self._gpus = config, blobs, tuple(gpus)
        self._pool, self._model = pool, model
        self._limits = PixelLimits(config.max_pixels, config.model_pixels)
        # of two edits a process has in memory, one is computed while the other's pictures arrive
        self._held = asyncio.Semaphore(2 * config.image_processes)
        self._in_pool = partial(pool.timed, limit_s=config.image_timeout_s)
        self._thread = ModelThread()
        self._finding = None
        if segmenter is not None:
            self._finding = SegmentationHandler(config, blobs, pool, self._thread, segmenter, self._held)
        self._answering: dict[asyncio.Timeout, str] = {}
        """Questions in progress, by their time limit."""
        self._empty_text = EmptyPromptCache(model, self._thread, blobs, config.instance)
        self._cut_off_s: float | None = None
        """The end of draining, on the loop's clock."""

    async def run(self, bus: Bus, stop: asyncio.Event) -> None:
        """Answer and tell of this instance until `stop`; then say *draining* and finish the open questions.

        Questions that are open after `drain_s` are refused, so that their askers turn to another instance at once.

        Raises:
            Failed: the model does not work.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._thread.close)
            folder = stack.enter_context(scratch_folder())
            loras = await stack.enter_async_context(LoraPool(1))
            await self._thread.timed(CallPriority.BEGIN, self._model.rehearse)
            if self._finding is not None:
                await self._thread.timed(CallPriority.BEGIN, rehearse_segmenter, self._finding.segmenter)
            endpoints = self._endpoints(bus, loras, folder)
            await stack.enter_async_context(bus.serve("prepost", *endpoints, instance=self._config.instance))
            await stack.enter_async_context(telemetry(bus, self._config.telemetry_hz, self._state))
            log.info("ready", model=self._model.card.name, digest=self._model.card.digest[:12])
            await stop.wait()
            log.info("draining")
            self._cut_off_s = asyncio.get_running_loop().time() + self._config.drain_s
            for answer in self._answering:
                answer.reschedule(self._cut_off_s)
        log.info("drained")

    def _endpoints(self, bus: Bus, loras: LoraPool, text_folder: Path) -> tuple[Endpoint, ...]:
        """Return what is answered; text parts of LoRAs are kept in `text_folder`."""
        config, name = self._config, self._model.card.name
        masks = [] if self._finding is None else [self._until_cut_off(self._finding.answer)]
        texts = TextLoraCache(
            bus, text_folder, file_bytes=config.lora_file_bytes, kept_bytes=config.lora_text_bytes
        )
        encode = partial(self.encode, texts=texts)
        normaliser = LoraNormaliser(bus, loras, self._model.card, config)
        stages: dict[str, tuple[type[Question], Callable[..., Awaitable[BaseModel]]]] = {
            "inspect": (InspectRequest, self._until_cut_off(self.inspect)),
            "encode": (EncodeRequest, self._until_cut_off(encode)),
            "finish": (FinishRequest, self._until_cut_off(self.finish)),
            "template": (TemplateRequest, self._until_cut_off(self.template)),
        }
        return (
            *(Endpoint(subjects.prepost_at(config.instance, verb), *one) for verb, one in stages.items()),
            Endpoint(
                subjects.prepost("adapter", name), NormaliseLora, self._until_cut_off(normaliser.answer)
            ),
            *(Endpoint(subjects.prepost("mask", name), MaskRequest, one) for one in masks),
        )

    async def inspect(self, request: InspectRequest) -> Inspection:
        """Decode and measure the job's pictures; prepare the picture for the autoencoder.

        A generation has none: its size alone is checked.
        """
        job = request.job
        job.check_model(self._model.card)
        if job.task is Task.GENERATE:
            return await self._inspected_generation(job)
        async with self._held:
            found, compute_ms = await self._inspected(job)
        stored = {name: await self._store(job, name, data) for name, data in found.blobs.items()}
        return found.measures.model_copy(update={**stored, "compute_ms": compute_ms})

    async def encode(self, request: EncodeRequest, texts: TextLoraCache) -> Encoding:
        """Conditioning of the job and of each of its rows; `texts` has the text parts of its LoRAs."""
        job = request.job
        job.check_model(self._model.card)
        inspection = request.inspection
        prepared, references, controls = [
            None if ref is None else await intermediate(self._blobs, ref, Intermediate.PREPARED)
            for ref in (inspection.prepared, inspection.references, inspection.controls)
        ]
        inputs = encoding.EncodingInputs(
            prepared, references, controls, await texts.of(job.loras) if job.loras else ()
        )
        size = Size(inspection.model_width, inspection.model_height)
        with span("encode") as encoding_span:
            made, compute_ms = await self._thread.timed(
                CallPriority.BEGIN, encoding.encode_job, self._model, job, inputs, size
            )
            encoding_span.note(compute_ms=compute_ms)
        store = partial(self._store, job)
        shared = None
        if made.references is not None:
            shared = await store("reference-latents", made.references)
        clean = sum(height * width for height, width in inspection.reference_grids)
        if job.task is not Task.GENERATE:
            clean += inspection.tokens
        return Encoding(
            text=await store("text", await asyncio.to_thread(tensors.pack, made.text)),
            text_tokens=self._model.text_tokens(made.text),
            padding_tokens=tensors.padding_tokens(made.text.get(tensors.PROMPT_MASK)),
            prompt_tokens=made.prompt_tokens,
            negative_prompt_tokens=made.negative_prompt_tokens,
            prefix_tokens=self._model.prefix_tokens(made.text, clean),
            rows=tuple([await store(f"row-{index}", data) for index, data in enumerate(made.rows)]),
            references=shared,
            controls=tuple(
                [await store(f"controls-{index}", data) for index, data in enumerate(made.controls)]
            ),
            empty_text=await self._empty_text.keep(
                job.tenant, size, encoding.seen_pictures(self._model, prepared, references)
            )
            if job.parameters.reuse is not Reuse.OFF
            else None,
            compute_ms=compute_ms,
        )

    async def finish(self, request: FinishRequest) -> FinishReply:
        """Decode one row's latents, paste, encode."""
        job = request.job
        job.check_model(self._model.card)
        size = Size(request.inspection.model_width, request.inspection.model_height)
        decode, decoded = self._model.decode, []
        with span("decode", index=request.index) as decoding:
            for ref in (request.latents, *request.others):
                latents = latents_of(await intermediate(self._blobs, ref, Intermediate.LATENTS), request)
                decoded.append(await self._thread.timed(CallPriority.FINISH, decode, latents, size))
            decode_ms = sum(took_ms for _, took_ms in decoded)
            decoding.note(compute_ms=decode_ms)
        painted = [pixels for pixels, _ in decoded]
        async with self._held:
            with span("paste", index=request.index) as pasting:
                file, paste_ms = await self._finished(job, request.inspection, painted)
                pasting.note(compute_ms=paste_ms)
        key = new_key(job.folder, f"image-{request.index}")
        return FinishReply(
            image=await self._blobs.put(key, file, job.result_ttl_s),
            decode_ms=decode_ms,
            paste_ms=paste_ms,
        )

    async def template(self, request: TemplateRequest) -> TemplateInputs:
        """The inputs of a template run: an edit of the picture with an empty mask and an empty prompt."""
        template = request.template
        template.check_model(self._model.card)
        parameters = EditParameters(prompt="-", size=template.size)  # its size alone is read
        async with self._held:
            image = await self._blobs.get(template.image)
            found, compute_ms = await self._in_pool(
                inspect_template, image, parameters, self._model.card, self._limits
            )
        row, _ = await self._thread.timed(
            CallPriority.BEGIN, encoding.template_row, self._model, found.prepared
        )
        measures = found.measures
        size = Size(measures.model_width, measures.model_height)
        seen = encoding.seen_pictures(self._model, found.prepared)
        folder, ttl_s = f"{template.tenant}/{template.template_id}/", TEMPLATE_INPUTS_TTL_S
        prepared = await self._blobs.put(new_key(folder, "prepared"), found.prepared, ttl_s)
        return TemplateInputs(
            inspection=measures.model_copy(update={"prepared": prepared, "compute_ms": compute_ms}),
            empty_text=await self._empty_text.keep(template.tenant, size, seen),
            conditioning=await self._blobs.put(new_key(folder, "row"), row, ttl_s),
        )

    def _until_cut_off(self, handler: Callable[[Q], Awaitable[R]]) -> Callable[[Q], Awaitable[R]]:
        """`handler`, ended with the time for draining."""

        async def handle(request: Q) -> R:
            answer = asyncio.timeout_at(self._cut_off_s)
            try:
                async with answer:
                    self._answering[answer] = question(request)
                    return await handler(request)
            except TimeoutError as error:
                if not answer.expired():
                    raise
                raise ServiceUnavailable("This instance is shutting down.") from error
            finally:
                self._answering.pop(answer, None)

        return handle

    async def _inspected(self, job: Job) -> tuple[InspectedEdit, float]:
        """Return what inspecting an edit finds, and the milliseconds that it took in a process of the pool."""
        if job.image is None:
            raise InputLost("A job without image has nothing to inspect.", received=job.job_id)
        image = await self._blobs.get(job.image)
        references = await self._files(job.references)
        beside = job.parameters, self._model.card, self._limits, references
        if job.regions:
            work = self._in_pool(inspect_regions, image, await self._files(job.regions), *beside)
        else:
            mask = await self._blobs.get(job.mask) if job.mask else None
            controls = ControlFiles(await self._files(job.control_images), job.controls)
            work = self._in_pool(inspect, image, mask, *beside, controls)
        with span("inspect pictures") as inspecting:
            found, compute_ms = await work
            inspecting.note(compute_ms=compute_ms)
        return found, compute_ms

    async def _inspected_generation(self, job: Job) -> Inspection:
        """The inspection of a generation, which has no picture but its references and control images."""
        card, limits, stored = self._model.card, self._limits, dict[str, object]()
        found, whole_ms = measure_generation(job.parameters, card, limits), 0.0
        async with self._held:
            if job.references:
                files = await self._files(job.references)
                beside, compute_ms = await self._in_pool(
                    prepare, files, card, limits.max_pixels, limits.budget_pixels
                )
                found, whole_ms = measure_generation(job.parameters, card, limits, beside.grids), compute_ms
                stored["references"] = await self._store(job, "references", beside.packed)
            if job.controls:
                size = Size(found.model_width, found.model_height)
                packed, compute_ms = await self._in_pool(
                    control_images,
                    await self._files(job.control_images),
                    job.controls,
                    ModelCrop(size, None, size),
                    limits.max_pixels,
                )
                whole_ms += compute_ms
                stored["controls"] = await self._store(job, "controls", packed)
        return found.model_copy(update=stored | {"compute_ms": whole_ms})

    async def _files(self, refs: Iterable[BlobRef]) -> list[bytes]:
        return [await self._blobs.get(ref) for ref in refs]

    async def _store(self, job: Job, name: str, data: bytes) -> BlobRef:
        """Store what the job's next stages read, for as long as an intermediate result is kept."""
        return await self._blobs.put(new_key(job.folder, name), data, job.intermediate_ttl_s)

    async def _finished(
        self, job: Job, inspection: Inspection, painted: Sequence[Pixels]
    ) -> tuple[bytes, float]:
        """The finished file, and the milliseconds that pasting and encoding took in a process of the pool."""
        if job.image is None:
            return await self._in_pool(encode_as_asked, DecodedPicture(painted[0]), job.parameters)
        if inspection.alpha is None:
            raise InputLost("The inspection of this job has no alpha.", received=job.job_id)
        alpha = await intermediate(self._blobs, inspection.alpha, Intermediate.ALPHA)
        pasted = await self._blobs.get(job.image), alpha, job.parameters, self._limits
        if job.regions:
            return await self._in_pool(finish_regions, *pasted, painted, inspection.crops)
        return await self._in_pool(finish, *pasted, painted[0], inspection.crop)

    def _state(self) -> ServiceState:
        return state_of(
            ServiceName.PREPOST,
            self._config,
            models=(self._model.card,),
            prepost=PrepostState(image_processes=self._config.image_processes),
            answering=tuple(self._answering.values()),
            gpus=self._gpus,
            masks=self._finding and self._finding.segmenter.card,
        )


def new_key(folder: str, name: str) -> str:
    """A key that no other call has.

    A stage that is tried again may differ in the last digit, and an earlier claim check keeps its bytes.
    """
    return f"{folder}{name}-{secrets.token_hex(4)}"


def latents_of(data: bytes, request: FinishRequest) -> torch.Tensor:
    """`latents` (tokens, 4 * latent_channels) of a row's blob."""
    latents = tensors.unpack(data).get("latents")
    if latents is None or latents.ndim != 2 or latents.shape[0] != request.inspection.tokens:
        received = "no latents" if latents is None else f"latents of shape {tuple(latents.shape)}"
        raise InputLost("A blob does not hold this row's latents.", received=received)
    return latents
