"""Block-causal families from door to door: prepost's bytes, the engine's steps and its pictures equal diffusers' own.

Their pipelines make pictures of text, and Klein-KV's of references. An edit is the pipeline's own call, blended after
each of its steps with the picture at the level of noise that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinKVPipeline, QwenImage21Pipeline
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata.latents import normalisation_of
from giornata.packed.region import region
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.families.processors import QwenTextProcessor
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.distances import distance
from tests.integration.painting import Served, assert_paints, ended, of_edit, of_generation, served
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, mask, picture

SIZE: Final = Size(128, 96)
"""8x6 tokens; whole slots of Qwen-Image 2.1."""
OTHER: Final = Size(64, 96)
SEED: Final = 7
EVEN: Final = [1.0, 0.75, 0.5, 0.25]
"""The noise levels of four steps before the scheduler shifts them."""
CLOSE: Final = 1e-5
"""Largest difference, relative to the largest value."""


@dataclass(frozen=True)
class Both:
    """A checkpoint, served and as diffusers has it."""

    family: Family
    served: Served
    pipeline: Any

    def called(self, steps: int, **told: Any) -> tuple[Tensor, Pixels]:
        """Final latents, (tokens, channels), and the picture that a call of the pipeline makes of them."""
        caught: list[Tensor] = []
        ended = told.pop("ended", lambda _step, latents: latents)

        def after(_pipeline: Any, step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.append(ended(step, tensors["latents"]))
            return {"latents": caught[-1]}

        painted = self.pipeline(
            **{
                "prompt": PROMPT,
                "width": SIZE.width,
                "height": SIZE.height,
                "num_inference_steps": steps,
                "generator": torch.Generator().manual_seed(SEED),
                "callback_on_step_end": after,
                **({"max_sequence_length": 48} if self.family is Family.FLUX2_KLEIN_KV else {}),
                **told,
            }
        ).images[0]
        return caught[-1][0], on_white(painted)

    def blended(self, row: Row) -> tuple[Tensor, Pixels]:
        """What the pipeline makes of an edit's row: it begins where the row does, at the last of the noise levels."""
        noise, clean, kept = (row.conditioning[name] for name in ("noise", "image_latents", "mask"))

        def ended(step: int, latents: Tensor) -> Tensor:
            level = row.track.levels[step + 1]
            return (1 - kept) * (level * noise + (1 - level) * clean) + kept * latents

        begun = row.latent[None]
        if self.family is Family.FLUX2_KLEIN_KV:
            begun = begun.transpose(1, 2).reshape(1, -1, *row.grid)
        given = {"image": [Image.fromarray(picture(SIZE))]} if self.family is Family.FLUX2_KLEIN_KV else {}
        told = {"sigmas": EVEN[-row.steps :], "latents": begun, "ended": ended} | given
        return self.called(len(EVEN), **told)


def on_white(painted: Image.Image) -> Pixels:
    """(height, width, 3): a picture with transparency is seen on white."""
    if painted.mode == "RGBA":
        white = Image.new("RGB", painted.size, (255, 255, 255))
        white.paste(painted, mask=painted.getchannel("A"))
        painted = white
    return np.asarray(painted)


@pytest.fixture(scope="module", params=[Family.FLUX2_KLEIN_KV, Family.QWEN_IMAGE_21], ids=str)
def both(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[Family], Path]) -> Both:
    family = Family(request.param)
    folder = tiny_checkpoint(family)
    if family is Family.FLUX2_KLEIN_KV:
        return Both(family, served(folder), opened(Flux2KleinKVPipeline, folder))
    processor = QwenTextProcessor.of(folder / "processor")
    return Both(family, served(folder), opened(QwenImage21Pipeline, folder, processor=processor))


@pytest.fixture(scope="module")
def klein(tiny_checkpoint: Callable[[Family], Path]) -> Both:
    folder = tiny_checkpoint(Family.FLUX2_KLEIN_KV)
    return Both(Family.FLUX2_KLEIN_KV, served(folder), opened(Flux2KleinKVPipeline, folder))


def assert_equal(both: Both, row: Row, found: tuple[Tensor, Pixels]) -> None:
    assert_paints(both.served, row, SIZE, *found, within=CLOSE)


def edited(both: Both, key: str, size: Size = SIZE, **asked: Any) -> Row:
    parameters = of_edit(both.served.card, **{"prompt": PROMPT, "seed": SEED} | asked)
    return both.served.edited(key, parameters, picture(size), mask(size), sampled=False)


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 4), (0.5, 2)])
def test_an_edit_equals_the_pipelines_steps_blended(both: Both, strength: float, steps: int) -> None:
    row = edited(both, "edit", num_inference_steps=4, strength=strength)
    assert (len(row.prompts), row.steps) == (1, steps)
    assert_equal(both, row, both.blended(row))


def test_prepost_tells_the_prefix_that_the_denoiser_computes(both: Both) -> None:
    card, images = both.served.card, both.served.images
    made = of_generation(card, prompt=PROMPT, seed=SEED, num_inference_steps=3)
    for row in (edited(both, "edit"), both.served.generated("made", made, SIZE)):
        text = images.encode_text(PROMPT, SIZE)
        picture = row.image_tokens if "image_latents" in row.conditioning else 0
        assert (images.prefix_tokens(text, picture),) == row.prefix
        assert images.text_tokens(text) == row.prompts[0].joint_tokens


def test_a_generation_equals_the_pipeline(both: Both) -> None:
    asked = of_generation(both.served.card, prompt=PROMPT, seed=SEED, num_inference_steps=3)
    row = both.served.generated("made", asked, SIZE)
    assert row.conditioning.keys() == {"noise"}
    assert_equal(both, row, both.called(3))


def test_a_guided_generation_equals_the_pipeline(both: Both) -> None:
    """Qwen-Image 2.1 computes a second half where there is a negative prompt; Klein-KV was distilled."""
    guided = {"negative_prompt": NEGATIVE, "true_cfg_scale": 2.5}
    card = both.served.card
    if both.family is Family.FLUX2_KLEIN_KV:
        assert not card.takes_negative_prompt
        return
    asked = of_generation(card, prompt=PROMPT, seed=SEED, num_inference_steps=3, **guided)
    row = both.served.generated("made", asked, SIZE)
    assert len(row.prompts) == len(row.prefix) == 2
    assert row.prefix[0] != row.prefix[1]
    assert_equal(both, row, both.called(3, **guided))


def test_references_equal_the_pipelines(klein: Both) -> None:
    """Two of other sizes, and a picture of a third."""
    scenes = [Image.fromarray(picture(Size(*sides))) for sides in ((64, 96), (144, 80))]
    asked = of_generation(klein.served.card, prompt=PROMPT, seed=SEED, num_inference_steps=4)
    row = klein.served.generated("made", asked, SIZE)
    plain = ended(klein.served.checkpoint, [row])["made"].latent
    latents = [clean(klein, each) for each in scenes]
    given = torch.cat([each.flatten(0, 1) for each in latents])
    grids = tuple((int(each.shape[0]), int(each.shape[1])) for each in latents)
    network = klein.served.checkpoint.family.network
    assert network.references.grids(row.grid, grids, generated=True) == grids
    conditioning = {**row.conditioning, "references": given}
    prefix = (network.prefix_tokens(row.prompts[0], grids),)
    assert prefix == (4 * 6 + 9 * 5,)
    referring = replace(row, conditioning=conditioning, beside=grids, prefix=prefix)
    found = klein.called(4, image=scenes)
    assert_equal(klein, referring, found)
    assert (plain - found[0]).abs().max() > 1000 * CLOSE * found[0].abs().max()


def clean(both: Both, scene: Image.Image) -> Tensor:
    """(height, width, channels) of a reference, as the pipeline encodes it."""
    pixels = both.pipeline.image_processor.preprocess(scene, height=scene.height, width=scene.width)
    with torch.no_grad():
        latents: Tensor = both.pipeline._encode_vae_image(pixels, torch.Generator())
    return latents[0].permute(1, 2, 0).contiguous()


def test_rows_of_one_batch_equal_each_alone(both: Both) -> None:
    """They differ in size, prompt, number of steps, strength and task."""
    card = both.served.card
    made = of_generation(card, prompt="a long scarf on the dog", seed=SEED, num_inference_steps=3)
    rows = [
        edited(both, "a", num_inference_steps=2, strength=1.0),
        edited(both, "b", OTHER, prompt="a scarf", num_inference_steps=4, strength=0.5),
        both.served.generated("c", made, OTHER),
    ]
    together = ended(both.served.checkpoint, rows)
    for row in rows:
        alone = ended(both.served.checkpoint, [row])[row.key.job_id]
        assert distance(together[row.key.job_id].latent, alone.latent) <= CLOSE


@pytest.mark.parametrize("form", list(CacheForm))
def test_an_edit_takes_from_a_recording_of_its_own_levels(both: Both, form: CacheForm) -> None:
    edit = edited(both, "edit", num_inference_steps=3, strength=1.0)
    found = region(edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0)
    assert found is not None
    recorded = replace(edit, records=RecordingSpec(frozenset({form}), EXACT))
    full = ended(both.served.checkpoint, [recorded])["edit"]
    template = CachedTemplate("itself", edit.grid, full.entries)
    taking = replace(edit, region=found, template=template, tolerance=0.0)
    assert distance(ended(both.served.checkpoint, [taking])["edit"].latent, full.latent) <= CLOSE


def test_previews_see_the_latent_pixels_that_are_decoded(both: Both) -> None:
    latent = edited(both, "edit", num_inference_steps=2, strength=1.0)
    clean_latents = latent.conditioning["image_latents"]
    network = both.served.checkpoint.family.network
    pixels = network.unpacked(clean_latents, latent.grid)
    assert torch.equal(network.packed(pixels), clean_latents)
    vae = both.pipeline.vae
    with torch.no_grad():
        decoded = normalisation_of(vae).decoded(vae, pixels[None])
    seen = np.asarray(both.pipeline.image_processor.postprocess(decoded)[0])
    assert np.abs(seen.astype(int) - both.served.images.decode(clean_latents, SIZE).astype(int)).max() <= 1
