"""What an instance makes of a job's references, and hands on."""

from __future__ import annotations

import numpy as np
import pytest

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.errors import UnsupportedImageFormat
from giornata.wire.jobs import Job
from giornata.wire.models import ModelCard
from tests.integration.prepost.asking import MASK, SCENE, a_job, encoded, inspected, png
from tests.patience import HUNG_S

WIDE = np.random.default_rng(5).integers(0, 256, (32, 70, 3), np.uint8)
FAMILY = Family.FLUX2_KLEIN
pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


async def with_references(blobs: RedisBlobs, job: Job, *files: bytes) -> Job:
    refs = [await blobs.put(f"{job.job_id}/reference_{nth}", file, HUNG_S) for nth, file in enumerate(files)]
    return job.model_copy(update={"references": tuple(refs)})


async def test_edits_and_generations_have_them_beside_their_rows(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    plain = await a_job(blobs, card, png(SCENE), png(MASK))
    edit = await with_references(blobs, plain, png(WIDE), png(SCENE))
    generation = edit.model_copy(update={"image": None, "mask": None})
    keys = set()
    for job, own in ((plain, 24), (edit, 24), (generation, 0)):
        inspection = await inspected(caller, job)
        encoding = await encoded(caller, job, inspection)
        keys.add(inspection.template_key)
        grids = ((2, 4), (4, 6)) if job.references else ()
        assert inspection.reference_grids == grids
        assert inspection.companion_tokens == own + 32 * bool(grids)
        if not grids:
            assert encoding.references is inspection.references is None
            continue
        assert encoding.references is not None
        latents = tensors.unpack(await blobs.get(encoding.references))
        assert {name: tuple(each.shape) for name, each in latents.items()} == {
            "reference_0": (2, 4, 32),
            "reference_1": (4, 6, 32),
        }
    assert len(keys) == 3  # a generation's is empty


async def test_what_is_no_picture_is_refused_by_name(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    job = await with_references(blobs, await a_job(blobs, card, png(SCENE), png(MASK)), b"GIF89a")
    for each in (job, job.model_copy(update={"image": None, "mask": None})):
        with pytest.raises(UnsupportedImageFormat) as raised:
            await inspected(caller, each)
        assert raised.value.field == "reference"
