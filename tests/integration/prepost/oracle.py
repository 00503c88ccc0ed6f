"""What diffusers' own pipelines prepare of an edit and make of it, caught in a real call; and what they generate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers import (
    ChromaImg2ImgPipeline,
    ChromaPipeline,
    Flux2KleinPipeline,
    QwenImageImg2ImgPipeline,
    QwenImagePipeline,
    StableDiffusion3Img2ImgPipeline,
    StableDiffusion3Pipeline,
    ZImageImg2ImgPipeline,
    ZImagePipeline,
)
from PIL import Image
from torch import Tensor

from giornata.families import Family
from giornata_lab.baseline.pipeline import PIPELINES, opened
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels

SIZE = Size(128, 64)
PROMPT, NEGATIVE = "a red hat on the dog", "blurry"
UNETS = {Family.SD, Family.SD_INPAINT, Family.SDXL, Family.SDXL_INPAINT}
Halves = list[dict[str, Tensor]]
TEXT_TO_IMAGE: dict[Family, Any] = {
    Family.SD3: StableDiffusion3Pipeline,
    Family.Z_IMAGE: ZImagePipeline,
    Family.FLUX2_KLEIN: Flux2KleinPipeline,
    Family.QWEN_IMAGE: QwenImagePipeline,
    Family.CHROMA: ChromaPipeline,
}
IMAGE_TO_IMAGE: dict[Family, Any] = {
    Family.SD3: StableDiffusion3Img2ImgPipeline,
    Family.Z_IMAGE: ZImageImg2ImgPipeline,
    Family.QWEN_IMAGE: QwenImageImg2ImgPipeline,
    Family.CHROMA: ChromaImg2ImgPipeline,
}
"""Klein has none."""


def picture(size: Size = SIZE) -> Pixels:
    return np.random.default_rng(1).integers(0, 256, (size.height, size.width, 3), np.uint8)


def mask(size: Size = SIZE) -> npt.NDArray[np.uint8]:
    """Neither symmetric nor aligned to latent pixels or tokens."""
    marked = np.zeros((size.height, size.width), np.uint8)
    marked[5:30, 10:71] = 255
    marked[40:45, 90:] = 255
    return marked


@dataclass
class Caught:
    """Tensors of one call, batched as the pipeline has them."""

    prepared: tuple[Tensor, ...] = ()
    """What `prepare_latents` returns: first latents, noise and, where they are needed, the picture's latents."""
    masked: tuple[Tensor, ...] = ()
    """Mask and, where there are such, the masked picture's latents."""
    halves: Halves = field(default_factory=list)
    """Text as the network first gets it: with the prompt and, where guidance is computed, without."""
    generator: Tensor | None = None
    """State of the generator when the network is first called."""
    latents: Tensor | None = None
    """After the last step."""
    picture: Pixels | None = None


class Oracle:
    """A family's pipeline."""

    def __init__(self, family: Family, folder: Path, **left_out: None) -> None:
        self.family = family
        self.pipeline = opened(PIPELINES[family], folder, **left_out)
        self.network = self.pipeline.unet if family in UNETS else self.pipeline.transformer

    def run(
        self,
        seed: int,
        *,
        size: Size = SIZE,
        marked: npt.NDArray[np.uint8] | None = None,
        steps: int = 2,
        strength: float = 1.0,
        **guidance: Any,
    ) -> Caught:
        """An edit, by default with :func:`mask`; `guidance` overrides what asks for it."""
        caught, generator = Caught(), torch.Generator().manual_seed(seed)
        forward, names = self.network.forward, ("prepare_latents", "prepare_mask_latents")
        originals = [getattr(self.pipeline, name) for name in names]

        def latents(*args: Any, **kwargs: Any) -> Any:
            made = originals[0](*args, **kwargs)
            caught.prepared = (made[0], made[6], made[1]) if self.family is Family.FLUX_KONTEXT else made
            return made

        def masks(*args: Any, **kwargs: Any) -> Any:
            result = originals[1](*args, **kwargs)
            caught.masked = result if isinstance(result, tuple) else (result,)
            return result

        first: list[float] = []

        def predict(*args: Any, **kwargs: Any) -> Any:
            time = float(
                torch.as_tensor(kwargs.get("timestep", args[1] if len(args) > 1 else 0)).flatten()[0]
            )
            first.append(time)
            if time == first[0]:
                caught.halves += HALVES[self.family](args, kwargs)
                caught.generator = generator.get_state() if caught.generator is None else caught.generator
            return forward(*args, **kwargs)

        def ended(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.latents = tensors["latents"]
            return {}

        self.pipeline.prepare_latents, self.pipeline.prepare_mask_latents = latents, masks
        self.network.forward = predict
        try:
            painted = self.pipeline(
                prompt=PROMPT,
                image=Image.fromarray(picture(size)),
                mask_image=Image.fromarray(mask(size) if marked is None else marked),
                width=size.width,
                height=size.height,
                num_inference_steps=steps,
                strength=strength,
                generator=generator,
                callback_on_step_end=ended,
                **self._told(guidance),
            ).images[0]
        finally:
            self.pipeline.prepare_latents, self.pipeline.prepare_mask_latents = originals
            self.network.forward = forward
        caught.picture = np.asarray(painted)
        if self.family is Family.SD3:
            caught.picture = self._decoded(caught.latents)
        return caught

    def generated(self, seed: int, *, size: Size = SIZE, steps: int = 2, **guidance: Any) -> Caught:
        """What the text-to-image pipeline over the same components makes."""
        shape = {"width": size.width, "height": size.height}
        return self._made(TEXT_TO_IMAGE[self.family], seed, steps, **shape, **guidance)

    def remade(
        self, seed: int, *, size: Size = SIZE, steps: int = 2, strength: float = 1.0, **guidance: Any
    ) -> Caught:
        """What the image-to-image pipeline over the same components makes of :func:`picture`."""
        given = {"image": Image.fromarray(picture(size)), "strength": strength}
        return self._made(
            IMAGE_TO_IMAGE[self.family],
            seed,
            steps,
            width=size.width,
            height=size.height,
            **given,
            **guidance,
        )

    def _made(self, kind: Any, seed: int, steps: int, **given: Any) -> Caught:
        """What another pipeline makes."""
        caught, modules = Caught(), self.pipeline.components
        pipeline = kind(**{name: modules[name] for name in modules if name in kind._get_signature_types()})
        pipeline.set_progress_bar_config(disable=True)
        if self.family is Family.CHROMA:
            mask_padding(pipeline)

        def ended(_pipeline: Any, _step: int, _time: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            caught.latents = tensors["latents"]
            return {}

        painted = pipeline(
            prompt=PROMPT,
            num_inference_steps=steps,
            generator=torch.Generator().manual_seed(seed),
            callback_on_step_end=ended,
            **self._told(given),
        ).images[0]
        caught.picture = np.asarray(painted)
        return caught

    @torch.no_grad()
    def _decoded(self, latents: Tensor | None) -> Pixels:
        """As `StableDiffusion3Pipeline` decodes; the one that inpaints forgets the shift that it encodes with."""
        assert latents is not None
        config = self.pipeline.vae.config
        pixels = self.pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor).sample
        return np.asarray(self.pipeline.image_processor.postprocess(pixels)[0])

    def _told(self, guidance: dict[str, Any]) -> dict[str, Any]:
        told: dict[str, Any] = {} if self.family in UNETS else {"max_sequence_length": 48}
        if self.family is not Family.FLUX2_KLEIN:  # its negative prompt is always empty
            told["negative_prompt"] = NEGATIVE
        if self.family is Family.FLUX_KONTEXT:
            told |= {"true_cfg_scale": 2.0, "_auto_resize": False, "max_area": SIZE.pixels}
        return told | guidance


def mask_padding(pipeline: Any) -> None:
    """Have a pipeline of Chroma mask padding; its own mask is numbers, which only dim it (diffusers #12116)."""
    prepare = pipeline._prepare_attention_mask

    def masked(*args: Any, **kwargs: Any) -> Any:
        made = prepare(*args, **kwargs)
        return None if made is None else made > 0

    pipeline._prepare_attention_mask = masked


def _unet(_args: Any, kwargs: dict[str, Any]) -> Halves:
    added = kwargs["added_cond_kwargs"] or {}
    names = {"text_embeds": "pooled_prompt_embeds", "time_ids": "add_time_ids"}
    return _chunks(
        {"prompt_embeds": kwargs["encoder_hidden_states"]} | {names[name]: added[name] for name in added}
    )


def _sd3(_args: Any, kwargs: dict[str, Any]) -> Halves:
    return _chunks(
        {
            "prompt_embeds": kwargs["encoder_hidden_states"],
            "pooled_prompt_embeds": kwargs["pooled_projections"],
        }
    )


def _chunks(tensors: dict[str, Tensor]) -> Halves:
    """The pipeline batches the unguided half first."""
    batch = len(tensors["prompt_embeds"])
    return [{name: tensor[i] for name, tensor in tensors.items()} for i in reversed(range(batch))]


def _z_image(args: Any, _kwargs: Any) -> Halves:
    return [{"prompt_embeds": embeds} for embeds in args[2]]


def _kontext(_args: Any, kwargs: dict[str, Any]) -> Halves:
    text, pooled = kwargs["encoder_hidden_states"][0], kwargs["pooled_projections"][0]
    return [{"prompt_embeds": text, "pooled_prompt_embeds": pooled}]


def _one(_args: Any, kwargs: dict[str, Any]) -> Halves:
    return [{"prompt_embeds": kwargs["encoder_hidden_states"][0]}]


def _chroma(_args: Any, kwargs: dict[str, Any]) -> Halves:
    """Without what the mask marks as padding."""
    embeds = kwargs["encoder_hidden_states"][0]
    return [{"prompt_embeds": embeds[kwargs["attention_mask"][0][: len(embeds)] > 0]}]


HALVES: dict[Family, Callable[[Any, dict[str, Any]], Halves]] = {
    **dict.fromkeys(UNETS, _unet),
    Family.FLUX_KONTEXT: _kontext,
    Family.SD3: _sd3,
    Family.Z_IMAGE: _z_image,
    Family.FLUX2_KLEIN: _one,
    Family.QWEN_IMAGE: _one,
    Family.CHROMA: _chroma,
}
"""Text of each half from the arguments of a call of the network."""
