"""What ControlNets see, and when it is drawn: as in the pipelines of diffusers, caught where they call a ControlNet."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    ControlNetModel,
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxMultiControlNetModel,
    SD3ControlNetModel,
    SD3MultiControlNetModel,
    StableDiffusion3ControlNetInpaintingPipeline,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
)
from diffusers.models.controlnets.multicontrolnet import MultiControlNetModel
from PIL import Image
from torch import Tensor

from giornata.control.expansion import control_input
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire.adapters import ControlInput
from giornata.wire.errors import InvalidField
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ControlImage, ControlledModel, GeneratingModel
from tests.integration.prepost.loras import oracle
from tests.integration.prepost.oracle import PROMPT, SIZE, mask, picture

SEED = 3
CPU = torch.device("cpu")
IMAGES = np.random.default_rng(8).integers(0, 256, (2, SIZE.height, SIZE.width, 3), np.uint8)
PIPELINES: Mapping[Family, tuple[Any, Any]] = {
    Family.FLUX_INPAINT: (FluxControlNetInpaintPipeline, FluxMultiControlNetModel),
    Family.SD3: (StableDiffusion3ControlNetPipeline, SD3MultiControlNetModel),
    Family.SD: (StableDiffusionControlNetInpaintPipeline, MultiControlNetModel),
    Family.SDXL: (StableDiffusionXLControlNetInpaintPipeline, MultiControlNetModel),
}
Checkpoint = Callable[[Family], Path]
opened = cache(oracle.opened)
"""A pipeline gives its parts to others, which change none of them."""


def tokens(latents: Tensor, side: int) -> Tensor:
    """(1, channels, h, w) cut into tokens one by one; latents that the pipeline has packed are tokens already."""
    if latents.ndim == 3:
        return latents[0]
    height, width = latents.shape[-2:]
    corners = [(y, x) for y in range(0, height, side) for x in range(0, width, side)]
    return torch.stack([latents[0, :, y : y + side, x : x + side].flatten() for y, x in corners])


class Reached(Exception):
    """The ControlNet is called."""


@dataclass
class Caught:
    """What a pipeline had prepared when it first called its ControlNet."""

    controls: list[Tensor]
    prepared: Any
    """What `prepare_latents` returned."""
    generator: Tensor


def nets(family: Family, pipeline: Any, **options: Any) -> list[Any]:
    """Two ControlNets of a family; they are called and compute nothing."""
    torch.manual_seed(1)
    if family is Family.FLUX_INPAINT:
        config = {**pipeline.transformer.config, "num_layers": 1, "num_single_layers": 0}
        shape = {k: v for k, v in config.items() if k not in {"out_channels", "patch_size"} and k[0] != "_"}
        return [FluxControlNetModel(**shape | options) for _ in range(2)]
    if family is Family.SD3:
        config = {
            **pipeline.transformer.config,
            "num_layers": 1,
            "dual_attention_layers": (),
            "qk_norm": None,
        }
        shape = {k: v for k, v in config.items() if k[0] != "_"}
        return [SD3ControlNetModel(**shape | options) for _ in range(2)]
    return [ControlNetModel.from_unet(pipeline.unet) for _ in range(2)]


def caught(kind: Any, pipeline: Any, controlnet: Any, **asked: Any) -> Caught:
    """Up to the first call of the ControlNet, with the row's seed for its own generator and for torch's."""
    taken = inspect.signature(kind.__init__).parameters
    components = {name: part for name, part in pipeline.components.items() if name in taken}
    whole = kind(**components, **_unasked(kind), controlnet=controlnet)
    found, generator = Caught([], None, torch.empty(0)), torch.Generator().manual_seed(SEED)
    prepare = whole.prepare_latents

    def prepared(*args: Any, **kwargs: Any) -> Any:
        found.prepared = prepare(*args, **kwargs)
        return found.prepared

    def called(*args: Any, **kwargs: Any) -> Any:
        seen = kwargs["controlnet_cond"]
        found.controls, found.generator = seen if isinstance(seen, list) else [seen], generator.get_state()
        raise Reached

    whole.prepare_latents, controlnet.forward = prepared, called
    torch.manual_seed(SEED)
    with contextlib.suppress(Reached):
        whole(
            prompt=PROMPT, width=SIZE.width, height=SIZE.height, num_inference_steps=1, generator=generator,
            guidance_scale=1.0, **asked,
        )  # fmt: skip
    assert found.controls, "the ControlNet was not reached"
    return found


def _unasked(kind: Any) -> dict[str, Any]:
    """What one kind of pipeline demands beside components."""
    return {"requires_safety_checker": False} if kind is StableDiffusionControlNetInpaintPipeline else {}


def asked_of(family: Family, images: list[Image.Image]) -> dict[str, Any]:
    edit = {"image": Image.fromarray(picture()), "mask_image": Image.fromarray(mask()), "strength": 1.0}
    return {"control_image": images} | ({} if family is Family.SD3 else edit)


@cache
def model_of(family: Family, folder: Path) -> Any:
    return FAMILIES[family](folder, read_model_card(folder), CPU, torch.float32)


def controlled(
    model: Any, sees: ControlInput, *, modes: bool = False, seeds: tuple[int, ...] = (SEED,)
) -> Any:
    assert isinstance(model, ControlledModel)
    made = model.encode_controls([ControlImage(pixels, sees) for pixels in IMAGES], mask())
    rows = model.encode_rows(  # type: ignore[attr-defined]  # it is an ImageModel, too
        picture(), mask(), seeds, modes=modes, draws=True, first=made.condition
    )
    return made.shared, list(rows)


@pytest.mark.parametrize("family", PIPELINES)
def test_two_control_images_are_seen_and_drawn_as_in_diffusers(
    family: Family, tiny_checkpoint: Checkpoint
) -> None:
    pipeline = opened(tiny_checkpoint(family))
    kind, multi = PIPELINES[family]
    options = {"force_zeros_for_pooled_projection": False} if family is Family.SD3 else {}
    both = multi(nets(family, pipeline, **options))
    found = caught(
        kind,
        pipeline,
        both,
        **asked_of(family, [Image.fromarray(one) for one in IMAGES]),
        controlnet_conditioning_scale=[1.0, 1.0],
    )
    model = model_of(family, tiny_checkpoint(family))
    sees = control_input({"_class_name": type(both.nets[0]).__name__, **both.nets[0].config})
    assert sees is ControlInput.USUAL
    shared, (row,) = controlled(model, sees)
    unet = family in {Family.SD, Family.SDXL}
    assert shared == unet
    for index, expected in enumerate(found.controls):
        seen = expected[0] if unet or family is Family.FLUX_INPAINT else tokens(expected, 2)
        if family is Family.FLUX_INPAINT:
            assert seen.shape == row["noise"].shape
        torch.testing.assert_close(row[f"control_{index}"], seen, rtol=1e-5, atol=1e-5)
    side = model.card.token_latents
    if (
        family is Family.SD3
    ):  # that pipeline makes pictures of text: its noise is drawn first from its generator
        (drawn,) = model.noise_rows(SIZE, [SEED])
        torch.testing.assert_close(drawn["noise"], tokens(found.prepared, side), rtol=1e-5, atol=1e-5)
        return
    noise, latents = found.prepared[1], found.prepared[2] if len(found.prepared) > 2 else None
    torch.testing.assert_close(
        row["noise"], tokens(noise, side) if noise.ndim == 4 else noise[0], rtol=1e-5, atol=1e-5
    )
    if latents is not None:
        expected = tokens(latents, side) if latents.ndim == 4 else latents[0]
        torch.testing.assert_close(row["image_latents"], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


def test_a_generation_of_flux_draws_its_control_image_before_its_noise(tiny_checkpoint: Checkpoint) -> None:
    family = Family.FLUX_INPAINT
    pipeline = opened(tiny_checkpoint(family))
    found = caught(
        FluxControlNetPipeline, pipeline, nets(family, pipeline)[0], control_image=Image.fromarray(IMAGES[0])
    )
    model = model_of(family, tiny_checkpoint(family))
    assert isinstance(model, GeneratingModel)
    made = model.encode_controls([ControlImage(IMAGES[0], ControlInput.USUAL)], None)  # type: ignore[attr-defined]  # it is a ControlledModel, too
    (row,) = model.noise_rows(SIZE, [SEED], draws=True, first=made.condition)
    torch.testing.assert_close(row["control_0"], found.controls[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row["noise"], found.prepared[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


def test_xlabs_controlnets_see_pixels_and_draw_nothing(tiny_checkpoint: Checkpoint) -> None:
    family = Family.FLUX_INPAINT
    pipeline = opened(tiny_checkpoint(family))
    (net, _) = nets(family, pipeline, conditioning_embedding_channels=16)
    found = caught(
        FluxControlNetInpaintPipeline,
        pipeline,
        net,
        **asked_of(family, Image.fromarray(IMAGES[0])),  # type: ignore[arg-type]  # one ControlNet takes one
    )
    model = model_of(family, tiny_checkpoint(family))
    shared, (row,) = controlled(model, control_input({"_class_name": "FluxControlNetModel", **net.config}))
    assert shared
    torch.testing.assert_close(row["control_0"], found.controls[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


@pytest.mark.parametrize("sees", [ControlInput.UNSHIFTED, ControlInput.MASKED])
def test_sd3_controlnets_of_other_inputs(sees: ControlInput, tiny_checkpoint: Checkpoint) -> None:
    pipeline = opened(tiny_checkpoint(Family.SD3))
    masked = sees is ControlInput.MASKED
    (net, _) = nets(Family.SD3, pipeline, **({"extra_conditioning_channels": 1} if masked else {}))
    assert control_input({"_class_name": "SD3ControlNetModel", **net.config}) is sees
    kind = StableDiffusion3ControlNetInpaintingPipeline if masked else StableDiffusion3ControlNetPipeline
    asked = {"control_mask": Image.fromarray(mask())} if masked else {}
    found = caught(kind, pipeline, net, control_image=Image.fromarray(IMAGES[0]), **asked)
    model = model_of(Family.SD3, tiny_checkpoint(Family.SD3))
    shared, (row,) = controlled(model, sees)
    assert not shared
    assert found.controls[0].shape[1] == 16 + masked
    torch.testing.assert_close(row["control_0"], tokens(found.controls[0], 2), rtol=1e-5, atol=1e-5)
    plain = next(model.encode_rows(picture(), mask(), [SEED], draws=True))
    assert all(torch.equal(row[name], plain[name]) for name in plain), (
        "a row draws the same without control images"
    )


@pytest.mark.parametrize("family", [Family.FLUX_INPAINT, Family.SD3])
def test_edits_that_may_reuse_draw_as_others_do(family: Family, tiny_checkpoint: Checkpoint) -> None:
    model = model_of(family, tiny_checkpoint(family))
    _, plain = controlled(model, ControlInput.USUAL, seeds=(1, 2))
    shared, reusing = controlled(model, ControlInput.USUAL, modes=True, seeds=(1, 2))
    assert not shared
    for own, other in zip(plain, reusing, strict=True):
        assert all(torch.equal(own[name], other[name]) for name in own.keys() - {"image_latents"})
        assert not torch.equal(own["image_latents"], other["image_latents"])


def test_what_a_family_or_a_generation_lacks_is_refused(tiny_checkpoint: Checkpoint) -> None:
    flux = model_of(Family.FLUX_INPAINT, tiny_checkpoint(Family.FLUX_INPAINT))
    with pytest.raises(InvalidField, match="masked"):
        flux.encode_controls([ControlImage(IMAGES[0], ControlInput.MASKED)], mask())
    sd3 = model_of(Family.SD3, tiny_checkpoint(Family.SD3))
    with pytest.raises(InvalidField, match="generation"):
        sd3.encode_controls([ControlImage(IMAGES[0], ControlInput.MASKED)], None)
