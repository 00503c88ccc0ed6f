"""Flux.2 dev from door to door: prepost's bytes and the engine's steps equal diffusers' own pipelines.

Its pipeline makes pictures of text and of references, and paints no mask. A masked edit is Klein's inpainting pipeline
over its network, with the guidance scale that Klein's leaves out.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import Flux2KleinInpaintPipeline, Flux2Pipeline
from diffusers.pipelines.flux2.pipeline_flux2 import format_input
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from PIL import Image
from torch import Tensor
from transformers import AutoTokenizer
from transformers.models.pixtral import image_processing_pil_pixtral

from giornata.families import Family
from giornata.packed.region import beside, region
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.families.processors import PixtralTextProcessor
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.distances import distance
from tests.integration.painting import Served, ended, final_latent, of_edit, of_generation, served
from tests.integration.prepost.oracle import PROMPT, mask, picture
from tests.integration.test_references import FIRST, SECOND, with_others

SIZE: Final = Size(112, 80)
OTHER: Final = Size(64, 96)
SEED, SCALE, STEPS = 7, 2.5, 3
LATENTS: Final = 1e-5
"""Largest difference of final latents, relative to the largest value. Rounding makes 1e-6."""
TEXT: Final = 48


def pixtral_processor(folder: Path) -> Any:
    """The tokenizer that the checkpoint names. Its module asks for torchvision, of which prompts need nothing."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    with mock.patch.dict(sys.modules, {name: image_processing_pil_pixtral}):
        kind: Any = importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    own = folder / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(own)
    pictures = image_processing_pil_pixtral.PixtralImageProcessorPil()
    return kind(pictures, tokenizer, chat_template=(own / "chat_template.jinja").read_text())


@dataclass(frozen=True)
class Both:
    """The checkpoint, served and as diffusers has it."""

    served: Served
    pipeline: Any

    def edited(
        self,
        key: str,
        references: Sequence[Pixels] = (),
        size: Size = SIZE,
        *,
        whole: bool = False,
        **asked: Any,
    ) -> Row:
        told = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS, "guidance_scale": SCALE}
        parameters = of_edit(self.served.card, **told | asked)
        marked = np.full((size.height, size.width), 255, np.uint8) if whole else mask(size)
        return self.served.edited(key, parameters, picture(size), marked, references=references)

    def generated(self, key: str, references: Sequence[Pixels] = (), size: Size = SIZE, **asked: Any) -> Row:
        told = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS, "guidance_scale": SCALE}
        return self.served.generated(key, of_generation(self.served.card, **told | asked), size, references)

    def made(self, pictures: Sequence[Pixels] = (), size: Size = SIZE, **asked: Any) -> tuple[Tensor, Pixels]:
        """Final latents (tokens, channels) of a call of the pipeline, and its picture."""
        images = [Image.fromarray(pixels) for pixels in pictures] or None
        return _called(
            self.pipeline,
            **{"prompt": PROMPT, "guidance_scale": SCALE, "max_sequence_length": TEXT} | asked,
            image=images,
            width=size.width,
            height=size.height,
        )

    def inpainted(self, references: Sequence[Pixels] = (), *, scale: float = SCALE, **asked: Any) -> Tensor:
        """What Klein's inpainting pipeline ends with over this network, which is told the guidance scale."""
        pictures = [Image.fromarray(pixels) for pixels in references]
        kind, parts = with_others(Flux2KleinInpaintPipeline, pictures[1:]), self.pipeline.components
        pipeline = kind(**parts | {"text_encoder": None, "tokenizer": None})
        pipeline.set_progress_bar_config(disable=True)
        embeds, _ = self.pipeline.encode_prompt(PROMPT, max_sequence_length=TEXT)
        with guided_by(pipeline.transformer, scale):
            latents, _ = _called(
                pipeline,
                prompt_embeds=embeds,
                guidance_scale=1.0,
                image=Image.fromarray(picture(SIZE)),
                mask_image=Image.fromarray(mask(SIZE)),
                **({"image_reference": pictures[0]} if pictures else {}),
                **asked,
            )
        return latents


def _called(pipeline: Any, **asked: Any) -> tuple[Tensor, Pixels]:
    caught: list[Tensor] = []

    def after(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        caught.append(tensors["latents"][0])
        return {}

    drawn = torch.Generator().manual_seed(SEED)
    told = {"num_inference_steps": STEPS, "generator": drawn, "callback_on_step_end": after} | asked
    painted = pipeline(**told).images[0]
    return caught[-1], np.asarray(painted)


@contextmanager
def guided_by(transformer: Any, scale: float) -> Iterator[None]:
    """The transformer as a pipeline calls it that tells no guidance scale."""
    forward = transformer.forward

    def guided(**told: Any) -> Any:
        return forward(**told | {"guidance": torch.tensor([scale])})

    with mock.patch.object(transformer, "forward", guided):
        yield


@pytest.fixture(scope="module")
def both(tiny_checkpoint: Callable[[Family], Path]) -> Both:
    folder = tiny_checkpoint(Family.FLUX2)
    pipeline = opened(Flux2Pipeline, folder, tokenizer=None)
    pipeline.tokenizer = pixtral_processor(folder)
    return Both(served(folder), pipeline)


@pytest.mark.parametrize("prompt", [PROMPT, "", "a [IMG] sign", "one two some " * 30], ids=len)
def test_conversations_are_the_tokens_of_pixtrals_processor(
    prompt: str, tiny_checkpoint: Callable[[Family], Path]
) -> None:
    """Padded on the left, and cut where they are too long."""
    folder = tiny_checkpoint(Family.FLUX2)
    told: dict[str, Any] = {
        "tokenize": True,
        "return_dict": True,
        "return_tensors": "pt",
        "add_generation_prompt": False,
        "padding": "max_length",
        "truncation": True,
        "max_length": TEXT,
    }
    messages = format_input([prompt], SYSTEM_MESSAGE)
    mine = PixtralTextProcessor.from_pretrained(folder / "tokenizer").apply_chat_template(messages, **told)
    theirs = pixtral_processor(folder).apply_chat_template(messages, **told)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert mine["input_ids"].shape == (1, TEXT)


@pytest.mark.parametrize("scale", [SCALE, None], ids=["asked", "by default"])
@pytest.mark.parametrize("references", [(), (FIRST,), (FIRST, SECOND)], ids=len)
def test_a_generation_equals_the_pipeline(
    both: Both, references: Sequence[Pixels], scale: float | None
) -> None:
    told = {} if scale is None else {"guidance_scale": scale}
    asked = {"prompt": PROMPT, "seed": SEED, "num_inference_steps": STEPS} | told
    row = both.served.generated("made", of_generation(both.served.card, **asked), SIZE, references)
    assert row.companions == sum(pixels.size // 3 // 256 for pixels in references)
    latents, painted = both.made(references, guidance_scale=4.0 if scale is None else scale)
    mine = final_latent(both.served, row)
    assert distance(mine, latents) <= LATENTS
    decoded = both.served.images.decode(mine, SIZE).astype(int)
    assert np.abs(decoded - painted.astype(int)).max() <= 1
    assert painted.std() > 5


@pytest.mark.parametrize("references", [(), (FIRST,), (FIRST, SECOND)], ids=len)
def test_an_edit_of_a_whole_picture_equals_the_pipeline(both: Both, references: Sequence[Pixels]) -> None:
    """The picture is the first one that the pipeline is given; by default all of it is begun from noise."""
    latents, _ = both.made([picture(SIZE), *references])
    assert (
        distance(final_latent(both.served, both.edited("whole", references, whole=True)), latents) <= LATENTS
    )


@pytest.mark.parametrize("strength", [0.6, 1.0])
@pytest.mark.parametrize("references", [(), (FIRST,), (FIRST, SECOND)], ids=len)
def test_a_masked_edit_equals_kleins_inpainting_of_its_network(
    both: Both, references: Sequence[Pixels], strength: float
) -> None:
    row = both.edited("edit", references, strength=strength)
    sizes = [pixels.size // 3 // 256 for pixels in references]
    assert row.companions == both.served.card.companion_tokens(row.image_tokens, sizes)
    assert distance(final_latent(both.served, row), both.inpainted(references, strength=strength)) <= LATENTS


def test_prompt_guidance_and_references_show(both: Both) -> None:
    """Otherwise the tests of equality would prove little."""
    rows = [
        both.generated("plain"),
        both.generated("prompt", prompt="a blue barn"),
        both.generated("scale", guidance_scale=4.0),
        both.generated("first", [FIRST]),
        both.generated("second", [SECOND]),
        both.generated("both", [FIRST, SECOND]),
        both.generated("turned", [SECOND, FIRST]),
    ]
    latents = [final_latent(both.served, row) for row in rows]
    for index, latent in enumerate(latents):
        assert all(distance(latent, other) > 30 * LATENTS for other in latents[:index])


def test_rows_of_one_batch_equal_the_pipeline_and_each_alone(both: Both) -> None:
    """They differ in size, prompt, steps, guidance scale, task, mask and references."""
    rows = [
        both.edited("edit", [FIRST, SECOND], strength=1.0, guidance_scale=4.0),
        both.generated("made", [FIRST], OTHER, prompt="a scarf", num_inference_steps=4, guidance_scale=1.0),
        both.edited("other", size=OTHER, strength=0.6, guidance_scale=7.5),
        both.generated("plain"),
    ]
    together = ended(both.served.checkpoint, rows)
    theirs = {
        "edit": both.inpainted((FIRST, SECOND), scale=4.0, strength=1.0),
        "made": both.made([FIRST], OTHER, prompt="a scarf", num_inference_steps=4, guidance_scale=1.0)[0],
        "plain": both.made()[0],
        "other": final_latent(both.served, rows[2]),
    }
    for name, latents in theirs.items():
        assert distance(together[name].latent, latents) <= LATENTS, name


@pytest.mark.parametrize("form", list(CacheForm))
def test_a_masked_row_beside_others_takes_what_was_recorded(both: Both, form: CacheForm) -> None:
    """It ends as in full on its region; outside of it, an empty template run leaves the picture's own latents."""
    edit = both.edited("edit", [FIRST], strength=1.0)
    touched = edit.conditioning["mask"].amax(dim=1).view(edit.grid) > 0
    found = region(touched)
    assert found is not None
    network = both.served.checkpoint.family.network
    others = [both.edited("plain", guidance_scale=4.0), both.generated("made", [SECOND])]
    for name, conditioning in (("itself", edit.conditioning), ("empty", network.unmasked(edit.conditioning))):
        run = replace(edit, conditioning=conditioning, records=RecordingSpec(frozenset({form}), EXACT))
        full = ended(both.served.checkpoint, [run])["edit"]
        taking = replace(
            edit,
            region=beside(found, edit.companions),
            template=CachedTemplate(name, edit.grid, full.entries),
            tolerance=0.0,
        )
        together = ended(both.served.checkpoint, [others[0], taking, others[1]])
        for other in others:
            assert distance(together[other.key.job_id].latent, final_latent(both.served, other)) <= LATENTS
        taken = together["edit"].latent
        if name == "itself":
            assert distance(taken, full.latent) <= LATENTS
        else:
            outside = ~touched.view(-1)
            assert torch.equal(taken[outside], edit.conditioning["image_latents"][outside])
