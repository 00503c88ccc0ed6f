"""ControlNets of a tiny Stable Diffusion 3.5 checkpoint, beside diffusers' pipelines with them; in float64."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import SD3ControlNetModel, SD3MultiControlNetModel
from PIL import Image
from torch import Tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle

from giornata.control.loading import load
from giornata.control.protocol import ControlNet
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.tensors import pack, unpack
from giornata.wire.adapters import ControlInput, ControlUse, control_name
from giornata_denoiser.attempts.adapting import adapters_of
from giornata_denoiser.checkpoint import load as load_network
from giornata_denoiser.rows.row import Row
from giornata_lab.baseline.pipeline import PIPELINES, opened
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ControlImage, ControlledModel
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.pictures import Pixels
from tests.contract.messages import JOB
from tests.fakes import tiny_sd3_control
from tests.fakes.local_controls import controls_of
from tests.integration.painting import Served, ended, of_edit, of_generation
from tests.integration.prepost.oracle import NEGATIVE, PROMPT, mask, picture

CPU = torch.device("cpu")
SEED = 7


@dataclass(frozen=True)
class Control:
    """A ControlNet, and how a request asks for it."""

    net: SD3ControlNetModel
    """As diffusers has it."""
    loaded: ControlNet
    """As the denoiser loads its files."""
    scale: float = 0.7
    start: float = 0.0
    end: float = 1.0

    @property
    def sees(self) -> ControlInput:
        return self.loaded.card.sees

    @property
    def use(self) -> ControlUse:
        card = self.loaded.card
        asked: dict[str, Any] = {"scale": self.scale, "start": self.start, "end": self.end}
        return ControlUse(model=card.name, digest=card.digest, sees=card.sees, **asked)


@dataclass(frozen=True)
class Asked:
    """A request."""

    size: Size
    steps: int = 4
    guidance: float = 3.5
    seed: int = SEED

    @property
    def fields(self) -> dict[str, Any]:
        guided = {"negative_prompt": NEGATIVE} if self.guidance > 1 else {}
        told = {"num_inference_steps": self.steps, "guidance_scale": self.guidance}
        return {"prompt": PROMPT, "seed": self.seed} | guided | told


class Sd3:
    """The checkpoint, served and as diffusers has it."""

    def __init__(self, folder: Path) -> None:
        images = FAMILIES[Family.SD3](folder, read_model_card(folder), CPU, torch.float64)
        self.served = Served(images, load_network(folder, dtype=torch.float64, device=CPU))
        self.pipeline: Any = opened(PIPELINES[Family.SD3], folder, dtype=torch.float64)

    def control(
        self, folder: Path, depth: int = 2, *, seed: int = 0, of: Any = None, **asked: float
    ) -> Control:
        """A random ControlNet, with the options `of` its configuration."""
        made = tiny_sd3_control.net(self.pipeline.transformer.config, depth, seed=seed, **(of or {}))
        made.save_pretrained(folder)
        torch.nn.Module.to(made, torch.float64)
        return Control(made, load(folder, torch.float64, CPU), **asked)

    def row(self, key: str, asked: Asked, controls: Sequence[Control], *, edit: bool = False) -> Row:
        """The row of an edit or a generation, through the bytes that travel."""
        images, size = self.served.images, asked.size
        if edit:
            given = of_edit(self.served.card, **asked.fields, strength=1.0)
            made = self.served.edited(key, given, picture(size), mask(size))
        else:
            made = self.served.generated(key, of_generation(self.served.card, **asked.fields), size)
        if not controls:
            return made
        assert isinstance(images, ControlledModel)
        shown = [ControlImage(seen(size, nth), each.sees) for nth, each in enumerate(controls)]
        encoded = images.encode_controls(shown, mask(size))
        named = unpack(pack(encoded.condition(torch.Generator().manual_seed(asked.seed))))
        job = JOB.model_copy(update={"controls": tuple(each.use for each in controls), "loras": ()})
        return replace(
            made,
            adapters=adapters_of(job, made.track.steps),
            control_images=tuple(named[control_name(nth)] for nth in range(len(controls))),
        )

    def ended(self, rows: Sequence[Row], controls: Sequence[Control] = ()) -> dict[str, Tensor]:
        """Final latents by job, of rows that share their batch."""
        nets = {each.loaded.card.digest: each.loaded for each in controls}
        checkpoint, multiple = self.served.checkpoint, self.served.card.pixel_multiple
        computing = controls_of(nets, checkpoint.family.network, multiple, held_steps=2)
        found = ended(checkpoint, rows, computing)
        return {job: row.latent for job, row in found.items()}

    def called(self, kind: Any, asked: Asked, controlnet: Any = None, **more: Any) -> Tensor:
        """(tokens, channels): what a pipeline of `kind` over the same components ends with."""
        taken = inspect.signature(kind.__init__).parameters
        parts = {name: part for name, part in self.pipeline.components.items() if name in taken}
        pipeline = kind(**parts, **({} if controlnet is None else {"controlnet": controlnet}))
        pipeline.set_progress_bar_config(disable=True)
        torch.manual_seed(asked.seed)  # these pipelines draw control images from torch's own generator
        latents = pipeline(
            prompt=PROMPT,
            negative_prompt=NEGATIVE,
            width=asked.size.width,
            height=asked.size.height,
            num_inference_steps=asked.steps,
            guidance_scale=asked.guidance,
            max_sequence_length=48,
            generator=torch.Generator().manual_seed(asked.seed),
            output_type="latent",
            **more,
        ).images
        return tokens(latents)


def seen(size: Size, index: int) -> Pixels:
    """Control image `index`: noise, (height, width, 3)."""
    return np.random.default_rng(20 + index).integers(0, 256, (size.height, size.width, 3), np.uint8)


def shown(size: Size, count: int) -> list[Image.Image]:
    return [Image.fromarray(seen(size, index)) for index in range(count)]


def tokens(latents: Tensor) -> Tensor:
    """(1, channels, height, width) cut into tokens of 2x2."""
    return pixel_unshuffle(latents, 2)[0].flatten(1).T


def maps(packed: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of :func:`tokens`."""
    return pixel_shuffle(packed.T.reshape(1, -1, *grid), 2)


@contextmanager
def alike(nets: Sequence[SD3ControlNetModel]) -> Iterator[None]:
    """Both halves see one control image; pipelines draw a sample of the posterior for each of them."""

    def first(_: Any, args: Any, given: dict[str, Any]) -> Any:
        image = given["controlnet_cond"]
        return args, given | {"controlnet_cond": image[:1].expand_as(image)}

    hooks = [net.register_forward_pre_hook(first, with_kwargs=True) for net in nets]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Expanded(SD3MultiControlNetModel):  # type: ignore[misc]  # diffusers does not annotate it
    """Sums samples behind the transformer's blocks; `SD3MultiControlNetModel` drops those that the first net lacks."""

    def __init__(self, nets: Sequence[SD3ControlNetModel], blocks: int) -> None:
        super().__init__(nets)
        self.blocks = blocks

    def forward(
        self, *, controlnet_cond: Sequence[Tensor], conditioning_scale: Sequence[float], **given: Any
    ) -> Any:
        total = [0.0] * self.blocks
        for net, image, scale in zip(self.nets, controlnet_cond, conditioning_scale, strict=True):
            (samples,) = net(controlnet_cond=image, conditioning_scale=scale, **given)
            for block in range(self.blocks):
                total[block] = total[block] + samples[int(block / (self.blocks / len(samples)))]
        return (total,)


@contextmanager
def wrapped(transformer: Any, control: Control, hint: Tensor, *, zeros: bool) -> Iterator[None]:
    """Pipelines that know no ControlNets run the transformer with one; `hint` is (1, channels, height, width)."""
    forward = transformer.forward

    def controlled(hidden_states: Tensor, **given: Any) -> Any:
        pooled = given["pooled_projections"]
        (samples,) = control.net(
            hidden_states=hidden_states,
            controlnet_cond=hint.expand(len(hidden_states), -1, -1, -1),
            conditioning_scale=control.scale,
            timestep=given["timestep"],
            encoder_hidden_states=given["encoder_hidden_states"],
            pooled_projections=torch.zeros_like(pooled) if zeros else pooled,
            return_dict=False,
        )
        return forward(hidden_states=hidden_states, **given, block_controlnet_hidden_states=samples)

    transformer.forward = controlled
    try:
        yield
    finally:
        del transformer.forward
