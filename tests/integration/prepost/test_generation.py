"""A job without image at prepost's endpoints: nothing is decoded, encoded or pasted but what it paints."""

from __future__ import annotations

import secrets
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.errors import TaskNotSupported, TooManyPixels
from giornata.wire.jobs import Job, Priority
from giornata.wire.models import ModelCard
from giornata.wire.requests import GenerationParameters
from giornata.wire.resolution import carried_out, fitted, resolve
from tests.integration.prepost.asking import encoded, finished, inspected
from tests.patience import HUNG_MS, HUNG_S

FAMILY = Family.FLUX_INPAINT
pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


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
        result_ttl_s=HUNG_S,
    )


@pytest.mark.parametrize("family", [FAMILY, Family.FLUX_FILL], indirect=True, ids=str)
async def test_a_job_without_image_is_measured_drawn_and_finished(
    card: ModelCard, caller: Bus, blobs: RedisBlobs
) -> None:
    job = job_of(card, n=2, size="64x48", output_format="webp")
    inspection = await inspected(caller, job)
    assert (inspection.tokens, inspection.compute_tokens, inspection.mask_ratio) == (12, 12, 1.0)
    assert (inspection.prepared, inspection.alpha, inspection.compute_set) == (None, None, None)
    with pytest.raises(TooManyPixels):
        await inspected(caller, job_of(card, size="512x512"))
    if card.family == Family.FLUX_FILL:
        with pytest.raises(TaskNotSupported, match="Accepted: edit"):
            await encoded(caller, job, inspection)
        return
    encoding = await encoded(caller, job, inspection)
    first, second = [tensors.unpack(await blobs.get(row)) for row in encoding.rows]
    assert first.keys() == second.keys() == {"noise"}
    assert not torch.equal(first["noise"], second["noise"])
    latents = await blobs.put("latents", tensors.pack({"latents": first["noise"]}), HUNG_S)
    file = await blobs.get((await finished(caller, job, inspection, latents)).image)
    picture = Image.open(BytesIO(file))
    assert (picture.format, picture.size, picture.mode) == ("WEBP", (64, 48), "RGB")
    assert np.asarray(picture).std() > 1
