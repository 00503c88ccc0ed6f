"""Control images, generations and regions through prepost's endpoints."""

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
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.adapters import Annotator, ControlUse
from giornata.wire.errors import InvalidField, NotSupported, TaskNotSupported, TooManyPixels
from giornata.wire.jobs import Encoding, Inspection, Job, Priority
from giornata.wire.messages import FinishReply, FinishRequest
from giornata.wire.models import ModelCard
from giornata.wire.requests import GenerationParameters
from giornata.wire.resolution import carried_out, fitted, resolve
from giornata_prepost.families.pipeline import ImageModel
from giornata_prepost.images.conditions import canny
from tests.integration.prepost.asking import (
    INSTANCES,
    MASK,
    SCENE,
    a_job,
    encoded,
    finished,
    inspected,
    png,
)
from tests.patience import HUNG_MS, HUNG_S
from tests.present import present

USES = (
    ControlUse(model="outline", digest="d", image=0),
    ControlUse(model="edges", digest="d", annotator=Annotator.CANNY),
)
CONTROL = np.random.default_rng(4).integers(0, 256, SCENE.shape, np.uint8)
FAMILY = Family.FLUX_INPAINT
pytestmark = pytest.mark.asyncio(loop_scope="module")
"""The instance of prepost is a module's."""


async def controlled(
    blobs: RedisBlobs, model: ImageModel, uses: tuple[ControlUse, ...] = USES, **fields: Any
) -> Job:
    job = await a_job(blobs, model.card, png(SCENE), png(MASK), n=2, **fields)
    image = await blobs.put(f"{job.job_id}/control", png(CONTROL), HUNG_S)
    return job.model_copy(update={"controls": uses, "control_images": (image,)})


async def through(caller: Bus, job: Job) -> tuple[Inspection, Encoding]:
    inspection = await inspected(caller, job)
    return inspection, await encoded(caller, job, inspection)


async def test_each_row_has_its_own_samples_whatever_is_reused(
    model: ImageModel, caller: Bus, blobs: RedisBlobs
) -> None:
    job = await controlled(blobs, model, reuse="off")
    inspection, encoding = await through(caller, job)
    seen = tensors.unpack(await blobs.get(present(inspection.controls)))
    picture = tensors.unpack(await blobs.get(present(inspection.prepared)))["image"].numpy()
    assert np.array_equal(seen["control_1"].numpy(), canny(picture))
    rows = [tensors.unpack(await blobs.get(row)) for row in encoding.controls]
    assert [set(row) for row in rows] == [{"control_0", "control_1"}] * 2
    assert not torch.equal(rows[0]["control_0"], rows[1]["control_0"])
    assert rows[0]["control_0"].shape == (inspection.tokens, 4 * model.card.latent_channels)
    assert "control_0" not in tensors.unpack(await blobs.get(encoding.rows[0]))
    _, reusing = await through(caller, await controlled(blobs, model, reuse="auto"))
    again = [tensors.unpack(await blobs.get(row)) for row in reusing.controls]
    assert [torch.equal(a["control_0"], b["control_0"]) for a, b in zip(rows, again, strict=True)] == [
        True
    ] * 2
    plain = (await through(caller, await a_job(blobs, model.card, png(SCENE), png(MASK))))[1]
    assert plain.controls == ()


@pytest.mark.parametrize("family", [Family.SD], indirect=True)
async def test_unets_see_pixels_that_all_rows_share(
    model: ImageModel, caller: Bus, blobs: RedisBlobs
) -> None:
    inspection, encoding = await through(caller, await controlled(blobs, model, reuse="off"))
    seen = tensors.unpack(await blobs.get(present(inspection.controls)))
    (shared,) = encoding.controls
    found = tensors.unpack(await blobs.get(shared))
    for name, pixels in seen.items():
        torch.testing.assert_close(found[name], pixels.permute(2, 0, 1) / 255, rtol=0, atol=1e-6)


async def test_a_generation_has_control_images_of_its_own_size(
    model: ImageModel, caller: Bus, blobs: RedisBlobs
) -> None:
    edit = await controlled(blobs, model, USES[:1], reuse="off")
    generation = edit.model_copy(
        update={
            "image": None,
            "mask": None,
            "parameters": edit.parameters.model_copy(update={"size": "160x112"}),
        }
    )
    inspection, encoding = await through(caller, generation)
    assert tensors.unpack(await blobs.get(present(inspection.controls)))["control_0"].shape == (112, 160, 3)
    assert len(encoding.controls) == 2
    assert inspection.prepared is None
    with pytest.raises(InvalidField, match="a generation has none"):
        await inspected(caller, generation.model_copy(update={"controls": USES}))


@pytest.mark.parametrize("family", [Family.Z_IMAGE], indirect=True)
async def test_a_family_without_controlnets_refuses_them(
    model: ImageModel, caller: Bus, blobs: RedisBlobs
) -> None:
    job = await controlled(blobs, model)
    with pytest.raises(NotSupported, match="no ControlNets") as raised:
        await through(caller, job)
    assert raised.value.field == "controlnets"


# A job without image: nothing is decoded, encoded or pasted but what it paints.


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


# Regions that are edited one by one: each row is that of an edit of its crop alone.


MASKS = [np.zeros(SCENE.shape[:2], np.uint8) for _ in range(2)]
MASKS[0][6:20, 8:22] = 255
MASKS[1][40:60, 60:80] = 255
ASKED: dict[str, Any] = {"padding_mask_crop": 4, "reuse": "off", "mask_blur": 0.0, "seed": 7}


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
