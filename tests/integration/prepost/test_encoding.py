"""What an instance encodes: prompts of guided edits and beside pictures, control images, generations and regions."""

from __future__ import annotations

import secrets
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.deadlines import Deadline
from giornata.families import Family
from giornata.wire import subjects
from giornata.wire.adapters import Annotator, ControlUse
from giornata.wire.errors import (
    InvalidField,
    NotSupported,
    TaskNotSupported,
    TooManyPixels,
    UnsupportedImageFormat,
)
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority
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
    template_inputs,
)
from tests.patience import HUNG_MS, HUNG_S
from tests.present import present

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


# Control images, generations and regions through prepost's endpoints.


USES = (
    ControlUse(model="outline", digest="d", image=0),
    ControlUse(model="edges", digest="d", annotator=Annotator.CANNY),
)
CONTROL = np.random.default_rng(4).integers(0, 256, SCENE.shape, np.uint8)
ANY_FAMILY = Family.FLUX_INPAINT


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


@pytest.mark.parametrize("family", [ANY_FAMILY, Family.FLUX_FILL], indirect=True, ids=str)
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


@pytest.mark.parametrize("family", [ANY_FAMILY, Family.SDXL], indirect=True, ids=str)
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
