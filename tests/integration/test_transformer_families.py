"""Driven families from door to door: prepost's bytes, the engine's steps and prepost's decoding equal diffusers' own.

Chroma's pipelines give their mask of padding as numbers, which only dim it. Theirs mask it here, as ours do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from giornata.families import Family
from giornata.latents import normalisation_of
from giornata.packed.region import beside, region
from giornata.wire.requests import EditParameters
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_prepost.images.geometry import Size
from tests.distances import distance
from tests.integration.painting import Served, assert_paints, ended, of_edit, of_generation, served
from tests.integration.prepost.oracle import (
    IMAGE_TO_IMAGE,
    NEGATIVE,
    PROMPT,
    Caught,
    Oracle,
    mask,
    mask_padding,
    picture,
)

FAMILIES: Final = (Family.SD3, Family.Z_IMAGE, Family.FLUX2_KLEIN, Family.QWEN_IMAGE, Family.CHROMA)
SIZE: Final = Size(112, 80)
"""35 tokens: Z-Image pads them."""
SEED: Final = 7
LATENTS: Final = 3e-5
"""Largest difference of final latents, relative to the largest value. Rounding makes 1e-6."""


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    family: Family
    served: Served
    oracle: Oracle

    def told(self, scale: float) -> dict[str, Any]:
        """The scale of classifier-free guidance, by the name that the family's pipelines have for it."""
        return {"true_cfg_scale" if self.family is Family.QWEN_IMAGE else "guidance_scale": scale}

    @property
    def plain(self) -> float:
        """A scale that guides nothing; 1 is the least true scale that requests may name."""
        return 1.0 if self.family is Family.QWEN_IMAGE else 0.0

    def asked(self, scale: float | None) -> dict[str, Any]:
        """What an application asks for: the scale, by default the family's own; a negative prompt where it is read."""
        card = self.served.card
        least = 1.0 if card.guided_above is None else card.guided_above
        guided = scale is None or scale > least
        negative = {"negative_prompt": NEGATIVE} if guided and self.family is not Family.FLUX2_KLEIN else {}
        return {"prompt": PROMPT, "seed": SEED} | negative | ({} if scale is None else self.told(scale))


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def both(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Both:
    family = Family(request.param)
    folder = tiny_checkpoint(family)
    oracle = Oracle(family, folder)
    if family is Family.CHROMA:
        mask_padding(oracle.pipeline)
    return Both(family, served(folder), oracle)


def packed(found: Caught) -> Tensor:
    """(tokens, channels) of a pipeline's final latents."""
    latents = found.latents
    assert latents is not None
    if latents.ndim == 3:
        return latents[0]
    return torch.nn.functional.pixel_unshuffle(latents, 2)[0].flatten(1).T


def assert_equal(both: Both, row: Row, found: Caught) -> None:
    assert found.picture is not None
    assert_paints(both.served, row, SIZE, packed(found), found.picture, within=LATENTS)


@pytest.mark.parametrize(
    ("scale", "steps", "strength"),
    [(0.0, 4, 0.6), (0.5, 2, 1.0), (2.5, 3, 1.0), (4.0, 4, 0.6)],
    ids=["plain", "barely guided", "guided", "guided below full strength"],
)
def test_an_edit_equals_the_inpainting_pipeline(
    both: Both, scale: float, steps: int, strength: float
) -> None:
    """A scale between 0 and 1 guides Z-Image, and no other."""
    scale = max(scale, both.plain)
    asked = both.asked(scale) | {"num_inference_steps": steps, "strength": strength}
    row = both.served.edited("edit", of_edit(both.served.card, **asked), picture(SIZE), mask(SIZE))
    assert len(row.prompts) == 1 + (scale > (0 if both.family is Family.Z_IMAGE else 1))
    found = both.oracle.run(SEED, size=SIZE, steps=steps, strength=strength, **both.told(scale))
    assert_equal(both, row, found)


@pytest.mark.parametrize("strength", [0.6, 1.0])
def test_an_edit_of_a_whole_picture_equals_the_image_to_image_pipeline(both: Both, strength: float) -> None:
    if both.family not in IMAGE_TO_IMAGE:
        pytest.skip("diffusers has no such pipeline of this family")
    asked = both.asked(2.5) | {"num_inference_steps": 3, "strength": strength}
    whole = np.full_like(mask(SIZE), 255)
    row = both.served.edited("edit", of_edit(both.served.card, **asked), picture(SIZE), whole)
    found = both.oracle.remade(SEED, size=SIZE, steps=3, strength=strength, **both.told(2.5))
    assert_equal(both, row, found)


def test_guidance_shows(both: Both) -> None:
    """Otherwise the tests of equality would prove little: scales are far apart, and so are prompts."""
    rows = [
        both.served.edited(str(name), of_edit(both.served.card, **asked), picture(SIZE), mask(SIZE))
        for name, asked in enumerate(
            both.asked(scale) | {"num_inference_steps": 2, "strength": 1.0} | more
            for scale, more in ((1.0, {}), (1.0, {"prompt": "a blue barn"}), (2.5, {}), (4.0, {}))
        )
    ]
    latents = [row.latent for row in ended(both.served.checkpoint, rows).values()]
    for index, latent in enumerate(latents):
        for other in latents[:index]:
            assert distance(latent, other) > 30 * LATENTS


@pytest.mark.parametrize("plain", [False, True], ids=["by default", "plain"])
def test_a_generation_equals_the_text_to_image_pipeline(both: Both, plain: bool) -> None:
    """By default both guide as far as the pipeline does unasked."""
    scale = both.plain if plain else None
    asked = both.asked(scale) | {"num_inference_steps": 3}
    row = both.served.generated("made", of_generation(both.served.card, **asked), SIZE)
    assert len(row.prompts) == (2 if scale is None else 1)
    assert row.conditioning.keys() == {"noise"}
    told = {} if scale is None else both.told(scale)
    assert_equal(both, row, both.oracle.generated(SEED, size=SIZE, steps=3, **told))


def test_rows_of_one_batch_equal_each_alone(both: Both) -> None:
    """They differ in size, prompt, number of steps, guidance and task."""
    card, size = both.served.card, Size(64, 96)

    def of(fields: dict[str, Any]) -> EditParameters:
        return of_edit(card, **fields)

    plain, guided = both.asked(both.plain), both.asked(2.5)
    rows = [
        both.served.edited("a", of(plain | {"num_inference_steps": 2}), picture(SIZE), mask(SIZE)),
        both.served.edited(
            "b",
            of(guided | {"prompt": "a scarf", "num_inference_steps": 4, "strength": 1.0}),
            picture(size),
            mask(size),
        ),
        both.served.generated("c", of_generation(card, **both.asked(None), num_inference_steps=3), size),
    ]
    together = ended(both.served.checkpoint, rows)
    for row in rows:
        alone = ended(both.served.checkpoint, [row])[row.key.job_id]
        assert distance(together[row.key.job_id].latent, alone.latent) <= LATENTS


@pytest.mark.parametrize("form", list(CacheForm))
def test_an_edit_takes_from_a_recording_of_its_own_levels(both: Both, form: CacheForm) -> None:
    """From a recording of itself it ends as in full; from a template run it computes its region and keeps the rest."""
    asked = of_edit(both.served.card, **both.asked(both.plain), num_inference_steps=3, strength=1.0)
    edit = both.served.edited("edit", asked, picture(SIZE), mask(SIZE), sampled=False)
    touched = edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0
    found = region(touched)
    assert found is not None
    network = both.served.checkpoint.family.network
    empty = replace(edit, conditioning=network.unmasked(edit.conditioning))
    latents = {}
    for name, run in (("itself", edit), ("empty", empty)):
        recorded = replace(run, records=RecordingSpec(frozenset({form}), EXACT))
        full = ended(both.served.checkpoint, [recorded])["edit"]
        template = CachedTemplate(name, edit.grid, full.entries)
        taking = replace(edit, region=beside(found, edit.companions), template=template, tolerance=0.0)
        latents[name] = full.latent, ended(both.served.checkpoint, [taking])["edit"].latent
    whole, taken = latents["itself"]
    assert distance(taken, whole) <= LATENTS
    other = latents["empty"][1]
    assert distance(other, whole) > LATENTS
    outside = ~touched.view(-1)
    assert torch.equal(other[outside], edit.conditioning["image_latents"][outside])


def test_previews_see_the_latent_pixels_that_are_decoded(both: Both) -> None:
    """The preview map is fitted to them."""
    asked = of_edit(both.served.card, **both.asked(both.plain), num_inference_steps=2, strength=1.0)
    row = both.served.edited("edit", asked, picture(SIZE), mask(SIZE))
    latent = row.conditioning["image_latents"]
    pixels = both.served.checkpoint.family.network.unpacked(latent, row.grid)
    assert torch.equal(both.served.checkpoint.family.network.packed(pixels), latent)
    vae = both.oracle.pipeline.vae
    with torch.no_grad():
        decoded = normalisation_of(vae).decoded(vae, pixels[None])
    seen = np.asarray(both.oracle.pipeline.image_processor.postprocess(decoded)[0])
    assert np.abs(seen.astype(int) - both.served.images.decode(latent, SIZE).astype(int)).max() <= 1
