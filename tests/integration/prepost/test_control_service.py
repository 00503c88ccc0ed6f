"""Control images through prepost's endpoints: from the files of a job to what its rows' ControlNets see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from giornata import tensors
from giornata.blobs import RedisBlobs
from giornata.bus.bus import Bus
from giornata.families import Family
from giornata.wire.adapters import Annotator, ControlUse
from giornata.wire.errors import InvalidField, NotSupported
from giornata.wire.jobs import Encoding, Inspection, Job
from giornata_prepost.families.pipeline import ImageModel
from giornata_prepost.images.conditions import canny
from tests.integration.prepost.asking import (
    MASK,
    SCENE,
    a_job,
    encoded,
    inspected,
    png,
)
from tests.patience import HUNG_S

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
    assert inspection.controls is not None
    seen = tensors.unpack(await blobs.get(inspection.controls))
    assert inspection.prepared is not None
    picture = tensors.unpack(await blobs.get(inspection.prepared))["image"].numpy()
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
    assert inspection.controls is not None
    seen = tensors.unpack(await blobs.get(inspection.controls))
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
    assert inspection.controls is not None
    assert tensors.unpack(await blobs.get(inspection.controls))["control_0"].shape == (112, 160, 3)
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
