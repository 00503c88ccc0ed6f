"""An instance of prepost, jobs for it, and what it is asked."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.wire import subjects
from giornata.wire.jobs import Encoding, Inspection, Job, Priority
from giornata.wire.messages import EncodeRequest, FinishReply, FinishRequest, InspectRequest, TemplateRequest
from giornata.wire.models import ModelCard
from giornata.wire.requests import EditParameters
from giornata.wire.resolution import cfg_scale, resolve
from giornata.wire.templates import TemplateInputs, TemplateRecord
from giornata.wire.workers import HostDevice, ServiceName, ServiceState
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.pipeline import ImageModel
from giornata_prepost.segmentation import Segmenter
from giornata_prepost.service import Prepost
from giornata_prepost.worker_pools import ImagePool
from tests import configs
from tests.patience import HUNG_MS, HUNG_S

SCENE = np.random.default_rng(3).integers(0, 256, (70, 100, 3), np.uint8)
MASK = np.zeros(SCENE.shape[:2], np.uint8)
MASK[20:40, 30:60] = 255
INSTANCES: dict[str, str] = {}
"""Which instance has a model, as routers know it by telemetry."""


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    target = BytesIO()
    Image.fromarray(pixels).save(target, "PNG")
    return target.getvalue()


def configured(folder: Path, nats_url: str, redis_url: str, **more: Any) -> PrepostConfig:
    """An instance on a CPU with the checkpoint in `folder`."""
    given: dict[str, Any] = {
        "model": str(folder),
        "nats_url": nats_url,
        "blobs_url": redis_url,
        "instance": f"prepost-{secrets.token_hex(3)}",
        "device": "cpu",
        "image_processes": 1,
        "model_pixels": 1 << 15,
    }
    return configs.configured(PrepostConfig, **given | more)


def own_name() -> str:
    """A model's name that no other instance has."""
    return f"tiny-{secrets.token_hex(3)}"


@asynccontextmanager
async def serving(
    config: PrepostConfig,
    caller: Bus,
    blobs: RedisBlobs,
    model: ImageModel,
    gpus: tuple[HostDevice, ...] = (),
    hear: Callable[[ServiceState], object] = lambda _: None,
    segmenter: Segmenter | None = None,
) -> AsyncIterator[asyncio.Event]:
    """An instance that says it is ready, and tells of itself to `hear`; setting the event drains it."""
    stop = asyncio.Event()
    async with ImagePool(config.image_processes) as pool, asyncio.TaskGroup() as tasks:
        INSTANCES[model.card.name] = config.instance
        service = Prepost(config, blobs, pool, model, gpus=gpus, segmenter=segmenter)
        heard = asyncio.Event()

        def told(state: ServiceState) -> None:
            hear(state)
            heard.set()

        subject = subjects.telemetry(ServiceName.PREPOST, config.instance)
        async with caller.listen(subject, ServiceState, told):
            tasks.create_task(service.run(caller, stop))
            await asyncio.wait_for(heard.wait(), HUNG_S)
        yield stop
        stop.set()


async def a_job(blobs: RedisBlobs, card: ModelCard, image: bytes, mask: bytes | None, **fields: Any) -> Job:
    parameters = resolve(EditParameters(prompt="a red hat", **fields), card, seed=5)
    job_id = secrets.token_hex(6)
    return Job(
        job_id=job_id,
        tenant="t",
        gateway="g",
        priority=Priority.INTERACTIVE,
        model=card.name,
        model_digest=card.digest,
        parameters=parameters,
        image=await blobs.put(f"{job_id}/image", image, HUNG_S),
        mask=None if mask is None else await blobs.put(f"{job_id}/mask", mask, HUNG_S),
        budget_ms=HUNG_MS,
        result_ttl_s=HUNG_S,
        cfg_scale=cfg_scale(parameters, card),
    )


async def inspected(caller: Bus, job: Job) -> Inspection:
    request = InspectRequest(job=job, remaining_ms=HUNG_MS)
    subject = subjects.prepost_at(INSTANCES[job.model], "inspect")
    return await caller.call(subject, request, Inspection, Deadline.after_ms(HUNG_MS))


async def encoded(caller: Bus, job: Job, inspection: Inspection) -> Encoding:
    request = EncodeRequest(job=job, inspection=inspection, remaining_ms=HUNG_MS)
    return await caller.call(
        subjects.prepost_at(INSTANCES[job.model], "encode"), request, Encoding, Deadline.after_ms(HUNG_MS)
    )


async def finished(caller: Bus, job: Job, inspection: Inspection, latents: Any) -> FinishReply:
    request = FinishRequest(job=job, inspection=inspection, index=0, latents=latents, remaining_ms=HUNG_MS)
    return await caller.call(
        subjects.prepost_at(INSTANCES[job.model], "finish"), request, FinishReply, Deadline.after_ms(HUNG_MS)
    )


async def template_inputs(
    caller: Bus, blobs: RedisBlobs, card: ModelCard, image: bytes, **changes: str
) -> TemplateInputs:
    name = f"template_{secrets.token_hex(6)}"
    template = TemplateRecord(
        template_id=name,
        tenant="t",
        model=card.name,
        model_digest=card.digest,
        size="auto",
        image=await blobs.put(f"t/{name}/image", image, HUNG_S),
        created_s=1,
        expires_s=2,
    ).model_copy(update=changes)
    request = TemplateRequest(template=template, remaining_ms=HUNG_MS)
    subject = subjects.prepost_at(INSTANCES[card.name], "template")
    return await caller.call(subject, request, TemplateInputs, Deadline.after_ms(HUNG_MS))
