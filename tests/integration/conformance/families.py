"""The table of families: diffusers' pipelines of each, how each is guided, and what it looks at beside its picture.

A family whose pipelines paint no mask is compared with its call for whole pictures, blended after each step with the
picture at the noise level that follows.
"""

from __future__ import annotations

import importlib
import inspect
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

import diffusers
import numpy as np
import torch
from diffusers.pipelines.qwenimage import (
    pipeline_qwenimage_edit,
    pipeline_qwenimage_edit_inpaint,
    pipeline_qwenimage_edit_plus,
)
from PIL import Image
from torch import Tensor
from torch.nn.functional import pixel_unshuffle
from transformers import AutoTokenizer
from transformers.models.pixtral import image_processing_pil_pixtral

from giornata.component_configs import SOLVERS
from giornata.families import Family
from giornata.wire.models import Sampler
from giornata_denoiser.rows.row import Row
from giornata_lab.baseline.pipeline import opened
from giornata_prepost.families.processors import QwenPictureProcessor, QwenTextProcessor
from giornata_prepost.images.pictures import Pixels, Size
from tests.integration.painting import Served, of_edit, of_generation, served
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, mask, mask_padding, picture

SEED: Final = 7
SIZE, OTHER = Size(112, 80), Size(64, 96)
TEXT: Final = 48
"""Tokens that prompts are padded to."""
REFERENCES: Final = tuple(picture(Size(*sides)) for sides in ((96, 128), (192, 64), (64, 192)))
UNETS: Final = (Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT)
Fields = dict[str, Any]
_BY_GUIDANCE: Final[Fields] = {"guidance_scale": 2.5, "negative_prompt": NEGATIVE}
_BY_TRUE_CFG: Final[Fields] = {"true_cfg_scale": 2.5, "negative_prompt": NEGATIVE}


@dataclass(frozen=True)
class FamilyCase:
    """One family: the fields of requests and of diffusers' pipelines have the same names."""

    family: Family
    inpaints: Any = None
    """The pipeline of a masked edit; None where the call of `whole` or of `generates` is blended."""
    whole: Any = None
    """The pipeline of an edit of a whole picture; None where diffusers has none."""
    generates: Any = None
    """The pipeline that makes pictures of text; None where there is none."""
    guided: Fields = field(default_factory=lambda: _BY_GUIDANCE)
    """Fields of a request that is guided away from another prompt, or by a scale that the network embeds."""
    plain: Fields = field(default_factory=lambda: {"guidance_scale": 1.0})
    """Of one that is guided by nothing."""
    unasked: Fields = field(default_factory=lambda: {"negative_prompt": NEGATIVE})
    """Of one that names no scale."""
    halves: int = 2
    """Prompts of a guided row."""
    size: Size = SIZE
    """35 tokens: Z-Image pads them."""
    other: Size = OTHER
    references: int = 0
    """References that its pipelines take."""
    listed: bool = False
    """Whether its pipelines take pictures as a list."""
    text: int | None = TEXT
    """The length of prompts that its pipelines are told."""
    blends: bool = True
    config: Fields = field(default_factory=dict)
    """Changes of the network's configuration."""


_UNET: Final[Fields] = {"size": Size(128, 128), "other": Size(64, 128), "text": None}
_QWEN: Final[Fields] = {"guided": _BY_TRUE_CFG, "plain": {"true_cfg_scale": 1.0}}
_LOOKING: Final[Fields] = {"references": 2, "listed": True, "unasked": {}}
_PLUS: Final = FamilyCase(
    Family.QWEN_IMAGE_EDIT_PLUS, whole=diffusers.QwenImageEditPlusPipeline, size=Size(128, 96), text=None,
    **_QWEN, **_LOOKING,
)  # fmt: skip
_DISTILLED: Final[Fields] = {
    "guided": _BY_TRUE_CFG | {"guidance_scale": 4.0}, "plain": {"guidance_scale": 2.0}, "unasked": {},
}  # fmt: skip
CASES: Final[Mapping[str, FamilyCase]] = {
    "flux-inpaint": FamilyCase(
        Family.FLUX_INPAINT, diffusers.FluxInpaintPipeline, diffusers.FluxImg2ImgPipeline, diffusers.FluxPipeline,
        **_DISTILLED,
    ),
    "flux-schnell": FamilyCase(
        Family.FLUX_INPAINT, diffusers.FluxInpaintPipeline, diffusers.FluxImg2ImgPipeline, diffusers.FluxPipeline,
        guided=_BY_TRUE_CFG, plain={}, unasked={}, config={"guidance_embeds": False},
    ),
    "flux-fill": FamilyCase(
        Family.FLUX_FILL, diffusers.FluxFillPipeline, guided={"guidance_scale": 30.0}, halves=1,
        plain={"guidance_scale": 2.0}, blends=False,
    ),
    "flux-kontext": FamilyCase(
        Family.FLUX_KONTEXT, diffusers.FluxKontextInpaintPipeline, diffusers.FluxKontextPipeline,
        diffusers.FluxKontextPipeline, references=1, **_DISTILLED,
    ),
    "sd": FamilyCase(
        Family.SD, diffusers.StableDiffusionInpaintPipeline, diffusers.StableDiffusionImg2ImgPipeline,
        diffusers.StableDiffusionPipeline, **_UNET,
    ),
    "sd-inpaint": FamilyCase(
        Family.SD_INPAINT, diffusers.StableDiffusionInpaintPipeline, blends=False, **_UNET
    ),
    "sdxl": FamilyCase(
        Family.SDXL, diffusers.StableDiffusionXLInpaintPipeline, diffusers.StableDiffusionXLImg2ImgPipeline,
        diffusers.StableDiffusionXLPipeline, **_UNET,
    ),
    "sdxl-inpaint": FamilyCase(
        Family.SDXL_INPAINT, diffusers.StableDiffusionXLInpaintPipeline, blends=False, **_UNET
    ),
    "sd3": FamilyCase(
        Family.SD3, diffusers.StableDiffusion3InpaintPipeline, diffusers.StableDiffusion3Img2ImgPipeline,
        diffusers.StableDiffusion3Pipeline,
    ),
    "z-image": FamilyCase(
        Family.Z_IMAGE, diffusers.ZImageInpaintPipeline, diffusers.ZImageImg2ImgPipeline, diffusers.ZImagePipeline,
        guided={"guidance_scale": 0.5, "negative_prompt": NEGATIVE}, plain={"guidance_scale": 0.0},
    ),
    "chroma": FamilyCase(
        Family.CHROMA, diffusers.ChromaInpaintPipeline, diffusers.ChromaImg2ImgPipeline, diffusers.ChromaPipeline
    ),
    "flux2": FamilyCase(
        Family.FLUX2, diffusers.Flux2KleinInpaintPipeline, diffusers.Flux2Pipeline, diffusers.Flux2Pipeline,
        guided={"guidance_scale": 7.5}, halves=1, **_LOOKING,
    ),
    "flux2-klein": FamilyCase(
        Family.FLUX2_KLEIN, diffusers.Flux2KleinInpaintPipeline, diffusers.Flux2KleinPipeline,
        diffusers.Flux2KleinPipeline, guided={"guidance_scale": 2.5}, **_LOOKING,
    ),
    "flux2-klein-kv": FamilyCase(
        Family.FLUX2_KLEIN_KV, whole=diffusers.Flux2KleinKVPipeline, generates=diffusers.Flux2KleinKVPipeline,
        guided={}, plain={}, halves=1, size=Size(128, 96), **_LOOKING,
    ),
    "qwen-image": FamilyCase(
        Family.QWEN_IMAGE, diffusers.QwenImageInpaintPipeline, diffusers.QwenImageImg2ImgPipeline,
        diffusers.QwenImagePipeline, **_QWEN,
    ),
    "qwen-image-edit": FamilyCase(
        Family.QWEN_IMAGE_EDIT, diffusers.QwenImageEditInpaintPipeline, diffusers.QwenImageEditPipeline, text=None,
        **_QWEN,
    ),
    "qwen-image-edit-plus": _PLUS,
    "qwen-image-edit-2511": replace(_PLUS, config={"zero_cond_t": True}),
    "qwen-image-2.1": FamilyCase(
        Family.QWEN_IMAGE_21, generates=diffusers.QwenImage21Pipeline, size=Size(128, 96), text=None,
        unasked={}, **_QWEN,
    ),
}  # fmt: skip
"""Cases by name; a checkpoint that differs by its configuration is a case of its own."""


@dataclass(frozen=True)
class Asked:
    """A request; `guidance` are fields of it and of the pipeline's call."""

    guidance: Fields
    steps: int = 3
    strength: float = 1.0
    references: int = 0
    prompt: str = PROMPT
    seed: int = SEED
    size: Size | None = None
    sampler: Sampler | None = None

    @property
    def seen(self) -> Sequence[Pixels]:
        return REFERENCES[: self.references]

    @property
    def fields(self) -> dict[str, Any]:
        told = {"prompt": self.prompt, "seed": self.seed, "num_inference_steps": self.steps}
        return told | dict(self.guidance) | ({"sampler": self.sampler} if self.sampler else {})


@dataclass(frozen=True)
class PaintedPicture:
    """What a pipeline ends with."""

    latents: Tensor
    """(tokens, channels)."""
    picture: Pixels


@dataclass(frozen=True)
class OpenFamily:
    """A checkpoint of a family as prepost and the denoiser serve it, beside diffusers' pipeline of it."""

    case: FamilyCase
    served: Served
    pipeline: Any

    def edit(self, asked: Asked, key: str = "edit", *, whole: bool = False, **more: Any) -> Row:
        """The row of an edit, by :func:`mask` or of the whole picture."""
        size = asked.size or self.case.size
        marked = np.full_like(mask(size), 255) if whole else mask(size)
        parameters = of_edit(self.served.card, **asked.fields, strength=asked.strength)
        return self.served.edited(key, parameters, picture(size), marked, references=asked.seen, **more)

    def generation(self, asked: Asked, key: str = "made", **more: Any) -> Row:
        """The row of a generation."""
        parameters = of_generation(self.served.card, **asked.fields)
        return self.served.generated(key, parameters, asked.size or self.case.size, asked.seen, **more)

    def inpainted(self, asked: Asked, row: Row) -> PaintedPicture:
        """What the pipelines make of a masked edit, whose row is told where its steps are blended."""
        if self.case.inpaints is None:
            return self._blended(asked, row)
        scenes = [Image.fromarray(pixels) for pixels in asked.seen]
        kind = with_others(self.case.inpaints, scenes[1:]) if scenes else self.case.inpaints
        size = asked.size or self.case.size
        shown: Fields = {"image": Image.fromarray(picture(size)), "mask_image": Image.fromarray(mask(size))}
        if scenes:
            shown["image_reference"] = scenes[0]
        if self.case.family is not Family.FLUX2:
            return self.called(kind, asked, **shown)
        # Klein's inpainting pipeline paints masks over this network, which embeds the scale that Klein's leaves out.
        embeds, _ = self.pipeline.encode_prompt(asked.prompt, max_sequence_length=TEXT)
        with guided_by(self.pipeline.transformer, asked.guidance["guidance_scale"]):
            told = {"prompt_embeds": embeds, "prompt": None, "guidance_scale": 1.0}
            return self.called(kind, asked, **shown, **told, parts={"text_encoder": None, "tokenizer": None})

    def repainted(self, asked: Asked) -> PaintedPicture:
        """What the pipelines make of an edit of a whole picture."""
        scenes = [Image.fromarray(each) for each in (picture(asked.size or self.case.size), *asked.seen)]
        return self.called(self.case.whole, asked, image=scenes if self.case.listed else scenes[0])

    def generated(self, asked: Asked) -> PaintedPicture:
        """What the text-to-image pipeline makes, with references where it takes some."""
        scenes = [Image.fromarray(each) for each in asked.seen]
        shown: Fields = {"image": scenes if self.case.listed else scenes[0]} if scenes else {}
        return self.called(self.case.generates, asked, **shown)

    def _blended(self, asked: Asked, row: Row) -> PaintedPicture:
        """What the call for a whole picture makes of a masked edit's row: it begins where the row does."""
        noise, clean, kept = (row.inputs.conditioning[name] for name in ("noise", "image_latents", "mask"))

        def blend(step: int, latents: Tensor) -> Tensor:
            level = row.track.levels[step + 1]
            return (1 - kept) * (level * noise + (1 - level) * clean) + kept * latents

        begun = row.latent[None]
        if self.case.family is Family.FLUX2_KLEIN_KV:
            begun = begun.transpose(1, 2).reshape(1, -1, *row.grid)
        levels = [1 - step / asked.steps for step in range(asked.steps)][-row.steps :]
        scenes = [Image.fromarray(each) for each in (picture(asked.size or self.case.size), *asked.seen)]
        shown: Fields = {"image": scenes} if self.case.listed else {}
        kind = self.case.whole or self.case.generates
        return self.called(kind, asked, sigmas=levels, latents=begun, blend=blend, **shown)

    def called(
        self, kind: Any, asked: Asked, *, parts: Fields | None = None, blend: Any = None, **shown: Any
    ) -> PaintedPicture:
        """What a pipeline of `kind` over the same components makes; it is told of a request what it takes."""
        own, size, caught = self.pipeline, asked.size or self.case.size, list[Tensor]()
        modules, made_of = own.components | dict(parts or {}), inspect.signature(kind.__init__).parameters
        pipeline = kind(**{name: one for name, one in modules.items() if name in made_of})
        pipeline.set_progress_bar_config(disable=True)
        if self.case.family is Family.CHROMA:
            mask_padding(pipeline)

        def ended(_pipeline: Any, step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.append(tensors["latents"] if blend is None else blend(step, tensors["latents"]))
            return {"latents": caught[-1]}

        told = asked.fields | {
            "width": size.width,
            "height": size.height,
            "strength": asked.strength,
            "generator": torch.Generator().manual_seed(asked.seed),
            "callback_on_step_end": ended,
            "_auto_resize": False,
            "max_area": size.pixels,
            **({} if self.case.text is None else {"max_sequence_length": self.case.text}),
            **shown,
        }
        taken = inspect.signature(kind.__call__).parameters
        with self._sampling(pipeline, asked), _of_size(self.case.family, size):
            painted = pipeline(**{name: value for name, value in told.items() if name in taken}).images[0]
        latents = caught[-1]
        if self.case.family is Family.SD3:
            painted = self._decoded(latents)
        if latents.ndim == 4:
            latents = pixel_unshuffle(latents, self.served.card.token_latents)[0].flatten(1).T[None]
        return PaintedPicture(latents[0], on_white(painted))

    @contextmanager
    def _sampling(self, pipeline: Any, asked: Asked) -> Iterator[None]:
        """Inside, a UNet's pipeline steps by the sampler that is asked for."""
        if self.case.family in UNETS:
            solver = SOLVERS[asked.sampler or Sampler(self.served.card.default_sampler)]
            kind = getattr(diffusers, solver.scheduler)
            pipeline.scheduler = kind.from_config(self.pipeline.scheduler.config, **solver.options)
        yield

    @torch.no_grad()
    def _decoded(self, latents: Tensor) -> Image.Image:
        """As `StableDiffusion3Pipeline` decodes; the one that inpaints forgets the shift that it encodes with."""
        vae = self.pipeline.vae
        pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
        decoded: Image.Image = self.pipeline.image_processor.postprocess(pixels)[0]
        return decoded


def open_family(
    name: str, checkpoint: Callable[[Family], Path], scratch: Path, dtype: torch.dtype | None = None
) -> OpenFamily:
    """Open a case's checkpoint, which is copied where its configuration changes."""
    case = CASES[name]
    folder = checkpoint(case.family)
    if case.config:
        folder = Path(shutil.copytree(folder, scratch / name))
        file = folder / "transformer" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | dict(case.config)))
    kind, parts = case.inpaints or case.whole or case.generates, dict[str, Any]()
    if case.family in {Family.QWEN_IMAGE_EDIT, Family.QWEN_IMAGE_EDIT_PLUS}:
        parts["processor"] = QwenPictureProcessor.of(folder / "processor")
    if case.family is Family.QWEN_IMAGE_21:
        parts["processor"] = QwenTextProcessor.of(folder / "processor")
    if case.family is Family.FLUX2:
        kind, parts["tokenizer"] = diffusers.Flux2Pipeline, None
    pipeline = opened(kind, folder, **parts, **({} if dtype is None else {"dtype": dtype}))
    if case.family is Family.FLUX2:
        pipeline.tokenizer = pixtral_processor(folder)
    return OpenFamily(case, served(folder, dtype), pipeline)


def pixtral_processor(folder: Path) -> Any:
    """The tokenizer that Flux.2's checkpoint names. Its module asks for torchvision, of which prompts need nothing."""
    name = "transformers.models.pixtral.image_processing_pixtral"
    with mock.patch.dict(sys.modules, {name: image_processing_pil_pixtral}):
        kind: Any = importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    own = folder / "tokenizer"
    pictures = image_processing_pil_pixtral.PixtralImageProcessorPil()
    template = (own / "chat_template.jinja").read_text()
    return kind(pictures, AutoTokenizer.from_pretrained(own), chat_template=template)


@contextmanager
def _of_size(family: Family, size: Size) -> Iterator[None]:
    """Inside, pipelines of Qwen-Image-Edit keep the tests' pictures, which they scale to about 1024² pixels."""
    if family is Family.QWEN_IMAGE_EDIT_PLUS:
        with mock.patch.object(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", 112**2):
            yield
        return
    kept: list[Any] = [nullcontext()] * 2
    if family is Family.QWEN_IMAGE_EDIT:
        kept = [
            mock.patch.object(module, "calculate_dimensions", return_value=(*size, None))
            for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_inpaint)
        ]
    with kept[0], kept[1]:
        yield


@contextmanager
def guided_by(transformer: Any, scale: float) -> Iterator[None]:
    """The transformer as a pipeline calls it that tells no guidance scale."""
    forward = transformer.forward

    def guided(**told: Any) -> Any:
        return forward(**told | {"guidance": torch.tensor([scale])})

    with mock.patch.object(transformer, "forward", guided):
        yield


def with_others(kind: Any, others: Sequence[Image.Image]) -> Any:
    """Klein's pipeline as it looks at these pictures, too, of whatever size: its list of latents takes any."""
    if not others:
        return kind

    class Several(kind):  # type: ignore[misc]  # diffusers is not typed
        def prepare_image_latents(self, images: list[Tensor], *arguments: Any, **named: Any) -> Any:
            sized = [self.image_processor.preprocess(one, one.height, one.width) for one in others]
            return super().prepare_image_latents([*images, *sized], *arguments, **named)

    return Several


def on_white(painted: Image.Image) -> Pixels:
    """(height, width, 3): a picture with transparency is seen on white."""
    if painted.mode == "RGBA":
        white = Image.new("RGB", painted.size, (255, 255, 255))
        white.paste(painted, mask=painted.getchannel("A"))
        painted = white
    return np.asarray(painted)
