"""Regions that are edited one by one, through prepost's endpoints: each row is that of an edit of its crop alone."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.errors import NotSupported
from giornata.wire.jobs import Job
from giornata.wire.messages import FinishReply, FinishRequest
from giornata.wire.models import ModelCard
from giornata_prepost.families.pipeline import ImageModel
from tests.integration.prepost.asking import (
    INSTANCES,
    SCENE,
    a_job,
    encoded,
    finished,
    inspected,
    png,
)
from tests.patience import HUNG_MS, HUNG_S

MASKS = [np.zeros(SCENE.shape[:2], np.uint8) for _ in range(2)]
MASKS[0][6:20, 8:22] = 255
MASKS[1][40:60, 60:80] = 255
ASKED: dict[str, Any] = {"padding_mask_crop": 4, "reuse": "off", "mask_blur": 0.0, "seed": 7}
FAMILY = Family.FLUX_INPAINT
pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


async def whole(blobs: RedisBlobs, card: ModelCard) -> Job:
    """Both regions in one job."""
    job = await a_job(blobs, card, png(SCENE), png(MASKS[0] | MASKS[1]), **ASKED)
    regions = [await blobs.put(f"{job.job_id}/region{i}", png(mask), HUNG_S) for i, mask in enumerate(MASKS)]
    return job.model_copy(update={"regions": tuple(regions)})


@pytest.mark.parametrize("family", [FAMILY, Family.SDXL], indirect=True, ids=str)
async def test_rows_are_those_of_edits_of_each_region_alone(
    caller: Bus, blobs: RedisBlobs, model: ImageModel
) -> None:
    card = model.card
    job = await whole(blobs, card)
    inspection = await inspected(caller, job)
    encoding = await encoded(caller, job, inspection)
    assert len(encoding.rows) == len(inspection.crops) == 2
    picture, decoded = png(SCENE), []
    for index, mask in enumerate(MASKS):
        edit = await a_job(blobs, card, picture, png(mask), **(ASKED | {"seed": 7 + index}))
        alone = await inspected(caller, edit)
        assert (alone.tokens, alone.model_width) == (inspection.tokens, inspection.model_width)
        assert inspection.crops[index] == alone.crop
        expected = tensors.unpack(await blobs.get((await encoded(caller, edit, alone)).rows[0]))
        row = tensors.unpack(await blobs.get(encoding.rows[index]))
        assert row.keys() == expected.keys()
        for name, tensor in row.items():
            torch.testing.assert_close(tensor, expected[name], msg=name)
        latents = tensors.pack({"latents": row["image_latents"]})
        decoded.append(await blobs.put(f"{job.job_id}/latents{index}", latents, HUNG_S))
        reply = await finished(caller, edit, alone, decoded[-1])
        picture = await blobs.get(reply.image)
    request = FinishRequest(
        job=job,
        inspection=inspection,
        index=0,
        latents=decoded[0],
        others=(decoded[1],),
        remaining_ms=HUNG_MS,
    )
    subject = subjects.prepost_at(INSTANCES[card.name], "finish")
    reply = await caller.call(subject, request, FinishReply, Deadline.after_ms(HUNG_MS))
    pasted = np.asarray(Image.open(BytesIO(await blobs.get(reply.image))))
    assert np.array_equal(pasted, np.asarray(Image.open(BytesIO(picture)))), "as edits one after the other"
    outside = (MASKS[0] | MASKS[1]) == 0
    assert np.array_equal(pasted[outside], SCENE[outside])
    assert not np.array_equal(pasted, SCENE)


async def test_a_model_that_reads_the_picture_in_the_prompt_is_refused(
    caller: Bus, blobs: RedisBlobs, model: ImageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(model), "text_varies_with_picture", True, raising=False)
    job = await whole(blobs, model.card)
    inspection = await inspected(caller, job)
    with pytest.raises(NotSupported) as caught:
        await encoded(caller, job, inspection)
    assert caught.value.field == "auto_edit"
