"""Pictures that a model looks at beside the one it edits: rows with them equal diffusers' own pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinPipeline, FluxKontextPipeline
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.packed.region import beside, region
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.baseline.pipeline import PIPELINES, opened
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.distances import distance
from tests.integration.painting import Served, ended, final_latent, of_edit, of_generation, served
from tests.integration.prepost.oracle import PROMPT, mask, picture

KLEIN, KONTEXT = Family.FLUX2_KLEIN, Family.FLUX_KONTEXT
SIZE: Final = Size(112, 80)
SEED, SCALE, STEPS = 7, 2.5, 3
LATENTS: Final = 1e-5
"""Largest difference of final latents, relative to the largest value. Rounding makes 7e-7."""


def looked_at(width: int, height: int) -> Pixels:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)


FIRST, SECOND = looked_at(64, 96), looked_at(80, 64)


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    family: Family
    served: Served
    pipeline: Any

    def edited(self, key: str, references: Sequence[Pixels] = (), **asked: Any) -> Row:
        told = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS, "guidance_scale": SCALE}
        parameters = of_edit(self.served.card, **told | asked)
        return self.served.edited(key, parameters, picture(SIZE), mask(SIZE), references=references)

    def latents(self, kind: Any, **told: Any) -> Tensor:
        """(tokens, channels): what a pipeline of `kind` ends with."""
        modules, caught = self.pipeline.components, []
        names = kind._get_signature_types()
        pipeline = kind(**{name: module for name, module in modules.items() if name in names})
        pipeline.set_progress_bar_config(disable=True)
        if self.family is KONTEXT:
            told |= {"_auto_resize": False, "max_area": SIZE.pixels}

        def ended(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.append(tensors["latents"][0])
            return {}

        pipeline(
            prompt=PROMPT,
            num_inference_steps=STEPS,
            guidance_scale=SCALE,
            max_sequence_length=self.served.card.max_text_tokens,
            generator=torch.Generator().manual_seed(SEED),
            callback_on_step_end=ended,
            **told,
        )
        return caught[-1]

    def inpainted(self, references: Sequence[Pixels] = (), **told: Any) -> Tensor:
        """What the inpainting pipeline ends with; it takes several references of one size at most."""
        pictures = [Image.fromarray(pixels) for pixels in references]
        kind = with_others(PIPELINES[self.family], pictures[1:])
        looked = {"image_reference": pictures[0]} if pictures else {}
        sides = {"width": SIZE.width, "height": SIZE.height}
        return self.latents(
            kind,
            image=Image.fromarray(picture(SIZE)),
            **{"mask_image": Image.fromarray(mask(SIZE)), "strength": 0.8} | looked | sides | told,
        )


def with_others(kind: Any, others: Sequence[Image.Image]) -> Any:
    """Klein's pipeline as it looks at these pictures, too, of whatever size: its list of latents takes any."""
    if not others:
        return kind

    class Several(kind):  # type: ignore[misc]  # diffusers is not typed
        def prepare_image_latents(self, images: list[Tensor], *arguments: Any, **named: Any) -> Any:
            sized = [self.image_processor.preprocess(one, one.height, one.width) for one in others]
            return super().prepare_image_latents([*images, *sized], *arguments, **named)

    return Several


@pytest.fixture(scope="module", params=[KLEIN, KONTEXT], ids=str)
def both(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Both:
    folder = tiny_checkpoint(request.param)
    return Both(request.param, served(folder), opened(PIPELINES[request.param], folder))


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_masked_edit_equals_the_inpainting_pipeline(both: Both, count: int) -> None:
    references = (FIRST, SECOND)[:count]
    if count > both.served.card.max_references:
        pytest.skip("the family takes one reference")
    row = both.edited("edit", references, strength=0.8)
    assert row.companions == row.image_tokens * (both.family is KLEIN or not count) + sum(
        pixels.size // 3 // 256 for pixels in references
    )
    assert row.companions == both.served.card.companion_tokens(
        row.image_tokens, [pixels.size // 3 // 256 for pixels in references]
    )
    assert distance(final_latent(both.served, row), both.inpainted(references)) <= LATENTS


def test_references_show(both: Both) -> None:
    """Otherwise the tests of equality would prove little."""
    plain, other = (
        final_latent(both.served, both.edited("a")),
        final_latent(both.served, both.edited("b", [FIRST])),
    )
    moved = final_latent(both.served, both.edited("c", [SECOND]))
    assert min(distance(plain, other), distance(moved, other)) > 300 * LATENTS


def test_an_edit_without_a_mask_equals_the_instruction_pipeline(both: Both) -> None:
    """All of the picture is begun from noise, and the picture itself is looked at."""
    parameters = of_edit(
        both.served.card,
        prompt=PROMPT,
        seed=SEED,
        num_inference_steps=STEPS,
        guidance_scale=SCALE,
        strength=1.0,
    )
    everything = np.full((SIZE.height, SIZE.width), 255, np.uint8)
    row = both.served.edited("whole", parameters, picture(SIZE), everything)
    kind = Flux2KleinPipeline if both.family is KLEIN else FluxKontextPipeline
    image = Image.fromarray(picture(SIZE))
    theirs = both.latents(
        kind,
        image=[image] if both.family is KLEIN else image,
        width=SIZE.width,
        height=SIZE.height,
    )
    assert distance(final_latent(both.served, row), theirs) <= LATENTS


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_generation_equals_the_pipeline_without_an_edited_picture(both: Both, count: int) -> None:
    references = (FIRST, SECOND)[:count]
    if count > both.served.card.max_references:
        pytest.skip("the family takes one reference")
    asked = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS, "guidance_scale": SCALE}
    row = both.served.generated("made", of_generation(both.served.card, **asked), SIZE, references)
    assert row.conditioning.keys() == ({"noise", "references"} if count else {"noise"})
    images: Any = [Image.fromarray(pixels) for pixels in references] or None
    kind = Flux2KleinPipeline if both.family is KLEIN else FluxKontextPipeline
    if both.family is KONTEXT:
        images = images and images[0]
    theirs = both.latents(kind, image=images, width=SIZE.width, height=SIZE.height)
    assert distance(final_latent(both.served, row), theirs) <= LATENTS


@pytest.mark.parametrize("form", list(CacheForm))
def test_a_masked_row_beside_others_takes_what_was_recorded(both: Both, form: CacheForm) -> None:
    """It computes its region alone; references are outside of it, recorded, and in the same places."""
    asked: dict[str, Any] = {"strength": 1.0, "guidance_scale": 1.0}  # nothing is guided
    edit = both.edited("edit", [FIRST], **asked)
    recorded = replace(edit, records=RecordingSpec(frozenset({form}), EXACT))
    full = ended(both.served.checkpoint, [recorded])["edit"]
    found = region(edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0)
    assert found is not None
    template = CachedTemplate("itself", edit.grid, full.entries)
    taking = replace(edit, region=beside(found, edit.companions), template=template, tolerance=0.0)
    others = [both.edited("plain", **asked), both.edited("other", [SECOND], **asked)]
    together = ended(both.served.checkpoint, [others[0], taking, others[1]])
    assert distance(together["edit"].latent, full.latent) <= LATENTS
    for other in others:
        assert distance(together[other.key.job_id].latent, final_latent(both.served, other)) <= LATENTS
