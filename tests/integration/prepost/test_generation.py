"""A job without image at prepost's endpoints: nothing is decoded, encoded or pasted but what it paints."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import AsyncIterator, Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.errors import TaskNotSupported, TooManyPixels
from giornata.wire.jobs import Job, Priority
from giornata.wire.models import ModelCard
from giornata.wire.requests import GenerationParameters
from giornata.wire.resolution import carried_out, fitted, resolve
from giornata_prepost.checkpoint import open_model
from giornata_prepost.config import PrepostConfig
from giornata_prepost.families.pipeline import ImageModel
from tests.configs import configured
from tests.integration.prepost.asking import encoded, finished, inspected, serving
from tests.patience import HUNG_MS


@pytest.fixture(scope="module", params=[Family.FLUX_INPAINT, Family.FLUX_FILL], ids=str)
def model(
    request: pytest.FixtureRequest,
    tiny_checkpoint: Callable[[Family], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> ImageModel:
    folder: Path = tmp_path_factory.mktemp("models") / f"tiny-{secrets.token_hex(3)}"
    shutil.copytree(tiny_checkpoint(request.param), folder)
    return open_model(PrepostConfig(model=str(folder), device="cpu"))


@pytest.fixture
async def caller(nats_url: str) -> AsyncIterator[Bus]:
    async with bus.connect(nats_url, "test") as connected:
        yield connected


@pytest.fixture
async def blobs(redis_url: str) -> AsyncIterator[RedisBlobs]:
    async with RedisBlobs.open(redis_url) as store:
        yield store


def job_of(card: ModelCard, **fields: Any) -> Job:
    asked = carried_out(GenerationParameters(prompt="a red barn", **fields))
    return Job(
        job_id=secrets.token_hex(6),
        tenant="t",
        gateway="g",
        priority=Priority.INTERACTIVE,
        model=card.name,
        model_digest=card.digest,
        parameters=resolve(fitted(asked, card), card, seed=5),
        budget_ms=HUNG_MS,
        result_ttl_s=60,
    )


async def test_a_job_without_image_is_measured_drawn_and_finished(
    model: ImageModel, caller: Bus, blobs: RedisBlobs
) -> None:
    name = f"prepost-{secrets.token_hex(3)}"
    config = configured(PrepostConfig, model="unread", instance=name, image_processes=1, model_pixels=1 << 14)
    job = job_of(model.card, n=2, size="64x48", output_format="webp")
    async with serving(config, caller, blobs, model):
        inspection = await inspected(caller, job)
        assert (inspection.tokens, inspection.compute_tokens, inspection.mask_ratio) == (12, 12, 1.0)
        assert (inspection.prepared, inspection.alpha, inspection.compute_set) == (None, None, None)
        with pytest.raises(TooManyPixels):
            await inspected(caller, job_of(model.card, size="512x512"))
        if model.card.family == Family.FLUX_FILL:
            with pytest.raises(TaskNotSupported, match="Accepted: edit"):
                await encoded(caller, job, inspection)
            return
        encoding = await encoded(caller, job, inspection)
        first, second = [tensors.unpack(data) for data in await _all(blobs, encoding.rows)]
        assert first.keys() == second.keys() == {"noise"}
        assert not torch.equal(first["noise"], second["noise"])
        latents = await blobs.put("latents", tensors.pack({"latents": first["noise"]}), 60)
        file = await blobs.get((await finished(caller, job, inspection, latents)).image)
    picture = Image.open(BytesIO(file))
    assert (picture.format, picture.size, picture.mode) == ("WEBP", (64, 48), "RGB")
    assert np.asarray(picture).std() > 1


async def _all(blobs: RedisBlobs, refs: Any) -> list[bytes]:
    return await asyncio.gather(*(blobs.get(ref) for ref in refs))
