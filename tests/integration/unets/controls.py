"""ControlNets of tiny UNet checkpoints, beside diffusers' pipelines with them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    ControlNetModel,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
)
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from PIL import Image
from torch import Tensor

from giornata.control.loading import load
from giornata.control.protocol import ControlNet
from giornata.wire.adapters import ControlUse, control_name
from giornata_denoiser.attempts.adapting import adapters_of
from giornata_denoiser.rows.row import Row
from giornata_prepost.families.protocol import ControlImage, ControlledModel
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.contract.messages import JOB
from tests.fakes import tiny_unet_control
from tests.fakes.local_controls import controls_of
from tests.integration.unets.served import CPU, Asked, Ended, Served, denoised, mask


@dataclass(frozen=True)
class Control:
    """A ControlNet, and how an edit asks for it."""

    net: ControlNetModel
    """As diffusers has it."""
    loaded: ControlNet
    """As the denoiser loads its files."""
    scale: float = 0.7
    start: float = 0.0
    end: float = 1.0

    @property
    def use(self) -> ControlUse:
        card = self.loaded.card
        asked: dict[str, Any] = {"scale": self.scale, "start": self.start, "end": self.end, "sees": card.sees}
        return ControlUse(model=card.name, digest=card.digest, **asked)


def control(of: Served, folder: Path, *, seed: int = 0, order: str = "rgb", **asked: float) -> Control:
    """A random ControlNet for the checkpoint's UNet, which sees no mask, also where the UNet does."""
    config, dtype = of.pipeline.unet.config, of.checkpoint.family.dtype
    made = tiny_unet_control.beside(config, seed=seed, controlnet_conditioning_channel_order=order)
    made.save_pretrained(folder)
    torch.nn.Module.to(made, dtype)
    return Control(made, load(folder, dtype, CPU), **asked)


def seen(size: Size, index: int) -> Pixels:
    """Control image `index`: noise, (height, width, 3)."""
    return np.random.default_rng(20 + index).integers(0, 256, (size.height, size.width, 3), np.uint8)


def under(of: Served, row: Row, controls: Sequence[Control], size: Size) -> Row:
    """`row` with ControlNets; each has a control image of its own, as prepost encodes it."""
    job = JOB.model_copy(update={"controls": tuple(each.use for each in controls), "loras": ()})
    return replace(
        row,
        adapters=adapters_of(job, row.track.steps),
        control_images=encoded(of, controls, size),
    )


def encoded(of: Served, controls: Sequence[Control], size: Size) -> tuple[Tensor, ...]:
    assert isinstance(of.images, ControlledModel)
    images = [ControlImage(seen(size, nth), each.loaded.card.sees) for nth, each in enumerate(controls)]
    made = of.images.encode_controls(images, mask(size))
    assert made.shared, "nothing is drawn of pixels"
    named = made.condition(torch.Generator())
    return tuple(named[control_name(nth)] for nth in range(len(images)))


def controlled(of: Served, rows: Sequence[Row], controls: Sequence[Control]) -> dict[str, Tensor]:
    """Final latents by job, of rows that share their batch and reuse nothing."""
    nets = {each.loaded.card.digest: each.loaded for each in controls}
    family, multiple = of.checkpoint.family, of.card.pixel_multiple
    return denoised(of, rows, controls_of(nets, family.network, multiple, held_steps=2))


def expected(of: Served, asked: Asked, controls: Sequence[Control]) -> Ended:
    """What the ControlNet inpainting pipeline makes of the same."""
    xl = hasattr(of.pipeline, "text_encoder_2")
    kind: Any = StableDiffusionXLControlNetInpaintPipeline if xl else StableDiffusionControlNetInpaintPipeline
    taken = inspect.signature(kind.__init__).parameters
    parts = {name: part for name, part in of.pipeline.components.items() if name in taken}
    several = len(controls) > 1
    both = MultiControlNetModel([each.net for each in controls]) if several else controls[0].net
    pipeline = kind(**parts, controlnet=both, **({} if xl else {"requires_safety_checker": False}))
    pipeline.set_progress_bar_config(disable=True)
    images = [Image.fromarray(seen(asked.size, nth)) for nth in range(len(controls))]
    told: dict[str, list[Any]] = {
        "controlnet_conditioning_scale": [each.scale for each in controls],
        "control_guidance_start": [each.start for each in controls],
        "control_guidance_end": [each.end for each in controls],
        "control_image": images,
    }
    return of.edited(asked, pipeline, **{name: each if several else each[0] for name, each in told.items()})
