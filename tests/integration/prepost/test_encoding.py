"""What an instance encodes of guided edits, of families whose text varies with the picture, and of references."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.errors import UnsupportedImageFormat
from giornata.wire.jobs import BlobRef, Job
from giornata.wire.models import ModelCard
from tests.integration.prepost.asking import (
    MASK,
    SCENE,
    a_job,
    encoded,
    inspected,
    png,
    template_inputs,
)
from tests.patience import HUNG_S

UPRIGHT = np.ascontiguousarray(SCENE.transpose(1, 0, 2))
FAMILY = Family.SDXL
pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


async def text_of(blobs: RedisBlobs, ref: BlobRef | None) -> dict[str, Tensor]:
    assert ref is not None
    return tensors.unpack(await blobs.get(ref))


@pytest.mark.parametrize(
    ("asked", "guided", "zeros"),
    [({}, True, True), ({"negative_prompt": "blurry"}, True, False), ({"guidance_scale": 1.0}, False, False)],
    ids=["by default", "against a prompt", "unguided"],
)
async def test_the_unguided_half_is_encoded_where_the_job_is_guided(
    caller: Bus, blobs: RedisBlobs, card: ModelCard, asked: dict[str, object], guided: bool, zeros: bool
) -> None:
    job = await a_job(blobs, card, png(SCENE), png(MASK), **asked)
    encoding = await encoded(caller, job, await inspected(caller, job))
    text = await text_of(blobs, encoding.text)
    assert ("negative_prompt_embeds" in text) == guided
    if guided:
        assert bool(text["negative_prompt_embeds"].any()) != zeros
        assert text["negative_add_time_ids"].tolist() == text["add_time_ids"].tolist()


async def test_the_empty_text_is_kept_by_size(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    wide, tall, again = [
        (await template_inputs(caller, blobs, card, png(picture))).empty_text
        for picture in (SCENE, UPRIGHT, SCENE)
    ]
    assert again == wide != tall
    assert (await text_of(blobs, wide))["add_time_ids"].tolist() == [64, 96, 0, 0, 64, 96]
    assert (await text_of(blobs, tall))["add_time_ids"].tolist() == [96, 64, 0, 0, 96, 64]


@pytest.mark.parametrize("family", [Family.QWEN_IMAGE_EDIT], indirect=True)
async def test_a_text_encoder_that_sees_is_shown_the_jobs_picture(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    pictures, empty, asked = (SCENE, 255 - SCENE), [], []
    for picture in pictures:
        job = await a_job(blobs, card, png(picture), png(MASK))
        encoding = await encoded(caller, job, await inspected(caller, job))
        inputs = await template_inputs(caller, blobs, card, png(picture))
        empty.append((await text_of(blobs, encoding.empty_text))["prompt_embeds"])
        asked.append((await text_of(blobs, encoding.text))["prompt_embeds"])
        recorded = (await text_of(blobs, inputs.empty_text))["prompt_embeds"]
        assert torch.equal(recorded, empty[-1])
        assert len(asked[-1]) == encoding.text_tokens > len(empty[-1])
    assert not torch.equal(*empty)
    assert not torch.equal(*asked)


@pytest.mark.parametrize("family", [Family.QWEN_IMAGE_EDIT_PLUS], indirect=True)
async def test_a_text_encoder_that_sees_references_is_shown_them_in_order(
    caller: Bus, blobs: RedisBlobs, card: ModelCard
) -> None:
    """The prompt's text, and the empty one's that a template run of the same pictures reads."""
    plain, found = await a_job(blobs, card, png(SCENE), png(MASK)), []
    files = [
        await blobs.put(f"{plain.job_id}/{nth}", png(each), HUNG_S)
        for nth, each in enumerate((UPRIGHT, SCENE))
    ]
    for given in ((), (files[0],), (files[0], files[1]), (files[1], files[0])):
        job = plain.model_copy(update={"references": given})
        inspection = await inspected(caller, job)
        assert [height > width for height, width in inspection.reference_grids] == [
            each is files[0] for each in given
        ]
        encoding = await encoded(caller, job, inspection)
        texts = [await text_of(blobs, ref) for ref in (encoding.text, encoding.empty_text)]
        assert len(texts[0]["prompt_embeds"]) == encoding.text_tokens
        found.append([text["prompt_embeds"] for text in texts])
    for plainest, one, two, turned in zip(*found, strict=True):
        assert len(plainest) < len(one) < len(two) == len(turned)
        assert not torch.equal(two, turned)


# What an instance makes of a job's references, and hands on.


WIDE = np.random.default_rng(5).integers(0, 256, (32, 70, 3), np.uint8)


async def with_references(blobs: RedisBlobs, job: Job, *files: bytes) -> Job:
    refs = [await blobs.put(f"{job.job_id}/reference_{nth}", file, HUNG_S) for nth, file in enumerate(files)]
    return job.model_copy(update={"references": tuple(refs)})


@pytest.mark.parametrize("family", [Family.FLUX2_KLEIN], indirect=True)
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


@pytest.mark.parametrize("family", [Family.FLUX2_KLEIN], indirect=True)
async def test_what_is_no_picture_is_refused_by_name(caller: Bus, blobs: RedisBlobs, card: ModelCard) -> None:
    job = await with_references(blobs, await a_job(blobs, card, png(SCENE), png(MASK)), b"GIF89a")
    for each in (job, job.model_copy(update={"image": None, "mask": None})):
        with pytest.raises(UnsupportedImageFormat) as raised:
            await inspected(caller, each)
        assert raised.value.field == "reference"
