"""ControlNets of tiny checkpoints, beside diffusers' pipelines with them; in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import (
    FluxControlNetInpaintPipeline,
    FluxMultiControlNetModel,
    SD3ControlNetModel,
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
)
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from PIL import Image
from torch import Tensor
from torch.nn.functional import pixel_shuffle

from giornata.control.networks import ControlNet, load
from giornata.families import Family
from giornata.tensors import pack, unpack
from giornata.wire.adapters import ControlInput, ControlUse, control_name
from giornata_denoiser.attempts.inputs import adapters_of
from giornata_denoiser.rows.row import Row
from giornata_prepost.images.pictures import Pixels, Size
from tests.contract.messages import JOB
from tests.fakes import tiny_flux_control, tiny_sd3_control, tiny_unet_control
from tests.fakes.local_controls import controls_of
from tests.integration.conformance.families import UNETS, Asked, Fields, OpenFamily
from tests.integration.painting import ended
from tests.integration.prepost.oracle import mask, picture

CPU: Final = torch.device("cpu")
_OF_SD: Final = StableDiffusionControlNetInpaintPipeline, MultiControlNetModel
_OF_SDXL: Final = StableDiffusionXLControlNetInpaintPipeline, MultiControlNetModel
PIPELINES: Final[Mapping[Family, tuple[Any, Any]]] = {
    Family.FLUX_INPAINT: (FluxControlNetInpaintPipeline, FluxMultiControlNetModel),
    Family.SD: _OF_SD,
    Family.SDXL: _OF_SDXL,
    Family.SDXL_INPAINT: _OF_SDXL,
    Family.SD3: (StableDiffusion3ControlNetPipeline, SD3MultiControlNetModel),
}
"""Pipelines with ControlNets, and what they have several in."""


@dataclass(frozen=True)
class Control:
    """A ControlNet, and how a request asks for it."""

    net: Any
    """As diffusers has it."""
    loaded: ControlNet
    """As the denoiser loads its files."""
    scale: float = 0.7
    start: float = 0.0
    end: float = 1.0
    mode: int | None = None

    @property
    def sees(self) -> ControlInput:
        return self.loaded.card.sees

    @property
    def use(self) -> ControlUse:
        card = self.loaded.card
        asked: dict[str, Any] = {"scale": self.scale, "start": self.start, "end": self.end, "mode": self.mode}
        return ControlUse(model=card.name, digest=card.digest, sees=card.sees, **asked)


def control(
    of: OpenFamily,
    folder: Path,
    *,
    seed: int = 0,
    depth: Sequence[int] = (),
    options: Mapping[str, Any] | None = None,
    **asked: Any,
) -> Control:
    """A random ControlNet for the checkpoint's network.

    `depth` are the blocks of one for a transformer: of Flux those of both kinds. `options` are its configuration's.
    """
    told, dtype = dict(options or {}), of.served.checkpoint.family.dtype
    if of.case.family in UNETS:
        made: Any = tiny_unet_control.beside(of.pipeline.unet.config, seed=seed, **told)
    else:
        kind: Any = tiny_sd3_control.net if of.case.family is Family.SD3 else tiny_flux_control.beside
        made = kind(of.pipeline.transformer.config, *depth, seed=seed, **told)
    made.save_pretrained(folder)
    torch.nn.Module.to(made, dtype)
    return Control(made, load(folder, dtype, CPU), **asked)


def seen(size: Size, index: int) -> Pixels:
    """Control image `index`: noise, (height, width, 3)."""
    return np.random.default_rng(20 + index).integers(0, 256, (size.height, size.width, 3), np.uint8)


def under(
    of: OpenFamily, make: Callable[..., Row], controls: Sequence[Control], asked: Asked, job: str
) -> Row:
    """The row that `make` makes, an edit or a generation, with ControlNets, whose control images prepost encodes."""
    if not controls:
        return make(asked, job)
    images, size = of.served.images, asked.size or of.case.size
    shown = [(seen(size, nth), each.sees) for nth, each in enumerate(controls)]
    encoded = images.encode_controls(shown, mask(size))
    pixels = of.case.family in UNETS or controls[0].sees is ControlInput.PIXELS
    assert encoded.shared == pixels, "nothing is drawn of pixels"
    named = unpack(pack(encoded.condition(torch.Generator().manual_seed(asked.seed))))
    row = make(asked, job, first=encoded.condition)
    uses = JOB.model_copy(update={"controls": tuple(each.use for each in controls), "loras": ()})
    return replace(
        row,
        adapters=adapters_of(uses, row.track.steps).seeing(
            [named[control_name(nth)] for nth in range(len(controls))]
        ),
    )


def controlled(of: OpenFamily, rows: Sequence[Row], controls: Sequence[Control]) -> dict[str, Tensor]:
    """Final latents by job, of rows that share their batch and reuse nothing."""
    nets = {each.loaded.card.digest: each.loaded for each in controls}
    checkpoint, multiple = of.served.checkpoint, of.served.card.pixel_multiple
    computing = controls_of(nets, checkpoint.family.network, multiple, held_steps=2)
    return {job: row.latent for job, row in ended(checkpoint, rows, computing).items()}


def expected(
    of: OpenFamily,
    asked: Asked,
    controls: Sequence[Control],
    *,
    multi: Any = None,
    kind: Any = None,
    **more: Any,
) -> Tensor:
    """What a pipeline with ControlNets makes: SD3's of text, others of a masked edit. `multi` stands for several."""
    size = asked.size or of.case.size
    shown: dict[str, Any] = {}
    chosen, several = PIPELINES[of.case.family]
    if of.case.family is Family.SD3:
        torch.manual_seed(asked.seed)  # these pipelines draw control images from torch's own generator
    else:
        shown |= {"image": Image.fromarray(picture(size)), "mask_image": Image.fromarray(mask(size))}
    nets, many = [each.net for each in controls], len(controls) > 1
    together = multi or (several(nets) if many else nets[0])
    told: dict[str, list[Any]] = {
        "controlnet_conditioning_scale": [each.scale for each in controls],
        "control_guidance_start": [each.start for each in controls],
        "control_guidance_end": [each.end for each in controls],
        "control_image": [Image.fromarray(seen(size, nth)) for nth in range(len(controls))],
    }
    if of.case.family is Family.FLUX_INPAINT and (many or controls[0].mode is not None):
        # nets without modes do not read it, and several are not run without
        told["control_mode"] = [each.mode or 0 for each in controls]
    shown |= {name: each if many else each[0] for name, each in told.items()}
    parts = {"controlnet": together, "requires_safety_checker": False}
    with alike(nets) if of.case.family is Family.SD3 else nullcontext():
        return of.called(kind or chosen, asked, parts=parts, **shown | more).latents


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
def wrapped(of: OpenFamily, control: Control, row: Row) -> Iterator[None]:
    """Inside, pipelines that know no ControlNets run the transformer with the one that `row` is under."""
    transformer, samples = of.pipeline.transformer, _of_sd3 if of.case.family is Family.SD3 else _of_flux
    forward, known = transformer.forward, dict[float, Fields]()

    def controlled(hidden_states: Tensor, **given: Any) -> Any:
        return forward(
            hidden_states=hidden_states, **given, **samples(control, row, hidden_states, given, known)
        )

    transformer.forward = controlled
    try:
        yield
    finally:
        del transformer.forward


def _seen(row: Row) -> Tensor:
    """What the row's one ControlNet sees."""
    (control,) = row.adapters.controls
    assert control.image is not None
    return control.image


def _of_sd3(
    control: Control, row: Row, hidden_states: Tensor, given: Fields, _: dict[float, Fields]
) -> Fields:
    """Arguments of the transformer; the halves of a row share a call."""
    hint = pixel_shuffle(_seen(row).T.reshape(1, -1, *row.grid), 2)
    pooled = given["pooled_projections"]
    usual = control.sees is ControlInput.USUAL
    (samples,) = control.net(
        hidden_states=hidden_states,
        controlnet_cond=hint.expand(len(hidden_states), -1, -1, -1),
        conditioning_scale=control.scale,
        timestep=given["timestep"],
        encoder_hidden_states=given["encoder_hidden_states"],
        pooled_projections=pooled if usual else torch.zeros_like(pooled),
        return_dict=False,
    )
    return {"block_controlnet_hidden_states": samples}


def _of_flux(
    control: Control, row: Row, hidden_states: Tensor, given: Fields, known: dict[float, Fields]
) -> Fields:
    """The negative half gets the positive's samples, as in `FluxControlNetPipeline`."""
    image, level = _seen(row), float(given["timestep"])
    shared = (
        "encoder_hidden_states", "pooled_projections", "timestep", "guidance", "txt_ids", "img_ids",
    )  # fmt: skip
    if level not in known:
        doubles, singles = control.net(
            hidden_states=hidden_states[..., : image.shape[-1]],
            controlnet_cond=image[None],
            conditioning_scale=control.scale,
            **{name: given[name] for name in shared},
            return_dict=False,
        )
        known[level] = {"controlnet_block_samples": doubles, "controlnet_single_block_samples": singles}
    return known[level]
