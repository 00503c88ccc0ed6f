"""What ControlNets of Flux see, and when it is drawn: as in diffusers' pipelines, caught where they call a ControlNet.

Those of other families are held to their pipelines by the conformance suite.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    FluxControlNetInpaintPipeline,
    FluxControlNetModel,
    FluxControlNetPipeline,
    FluxMultiControlNetModel,
)
from PIL import Image
from torch import Tensor

from giornata.control.layout import control_input
from giornata.families import Family
from giornata.model_cards import read_model_card
from giornata.wire.adapters import ControlInput
from giornata.wire.errors import InvalidField
from giornata_prepost.checkpoint import FAMILIES
from giornata_prepost.families.protocol import ControlImage
from tests.integration.prepost.loras import oracle
from tests.integration.prepost.oracle import PROMPT, SIZE, mask, picture

SEED = 3
CPU = torch.device("cpu")
IMAGES = np.random.default_rng(8).integers(0, 256, (2, SIZE.height, SIZE.width, 3), np.uint8)
Checkpoint = Callable[[Family], Path]


class Reached(Exception):
    """The ControlNet is called."""


@dataclass
class Caught:
    """What a pipeline had prepared when it first called its ControlNet."""

    controls: list[Tensor]
    prepared: Any
    """What `prepare_latents` returned."""
    generator: Tensor


def nets(pipeline: Any, **options: Any) -> list[Any]:
    """Two ControlNets; they are called and compute nothing."""
    torch.manual_seed(1)
    config = {**pipeline.transformer.config, "num_layers": 1, "num_single_layers": 0}
    shape = {k: v for k, v in config.items() if k not in {"out_channels", "patch_size"} and k[0] != "_"}
    return [FluxControlNetModel(**shape | options) for _ in range(2)]


def caught(kind: Any, pipeline: Any, controlnet: Any, **asked: Any) -> Caught:
    """Up to the first call of the ControlNet, with the row's seed for its own generator and for torch's."""
    taken = inspect.signature(kind.__init__).parameters
    components = {name: part for name, part in pipeline.components.items() if name in taken}
    whole = kind(**components, controlnet=controlnet)
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


def edit(control_image: Any) -> dict[str, Any]:
    """An edit's arguments."""
    shown = {"image": Image.fromarray(picture()), "mask_image": Image.fromarray(mask())}
    return {**shown, "control_image": control_image, "strength": 1.0}


@cache
def model_of(family: Family, folder: Path) -> Any:
    return FAMILIES[family](folder, read_model_card(folder), CPU, torch.float32)


def controlled(
    model: Any, sees: ControlInput, *, modes: bool = False, seeds: tuple[int, ...] = (SEED,)
) -> Any:
    made = model.encode_controls([ControlImage(pixels, sees) for pixels in IMAGES], mask())
    rows = model.encode_rows(picture(), mask(), seeds, modes=modes, draws=True, first=made.condition)
    return made.shared, list(rows)


def test_two_control_images_are_seen_and_drawn_as_in_diffusers(tiny_checkpoint: Checkpoint) -> None:
    folder = tiny_checkpoint(Family.FLUX_INPAINT)
    pipeline = oracle.loaded(folder)
    both: Any = FluxMultiControlNetModel(nets(pipeline))
    images = [Image.fromarray(one) for one in IMAGES]
    how = {**edit(images), "controlnet_conditioning_scale": [1.0, 1.0]}
    found = caught(FluxControlNetInpaintPipeline, pipeline, both, **how)
    model = model_of(Family.FLUX_INPAINT, folder)
    shared, (row,) = controlled(
        model, control_input({"_class_name": "FluxControlNetModel", **both.nets[0].config})
    )
    assert not shared
    wanted = {f"control_{index}": each[0] for index, each in enumerate(found.controls)}
    wanted |= {"noise": found.prepared[1][0], "image_latents": found.prepared[2][0]}
    for name, expected in wanted.items():
        torch.testing.assert_close(row[name], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


def test_a_generation_of_flux_draws_its_control_image_before_its_noise(tiny_checkpoint: Checkpoint) -> None:
    family = Family.FLUX_INPAINT
    pipeline = oracle.loaded(tiny_checkpoint(family))
    found = caught(
        FluxControlNetPipeline, pipeline, nets(pipeline)[0], control_image=Image.fromarray(IMAGES[0])
    )
    model = model_of(family, tiny_checkpoint(family))
    made = model.encode_controls([ControlImage(IMAGES[0], ControlInput.USUAL)], None)
    (row,) = model.noise_rows(SIZE, [SEED], draws=True, first=made.condition)
    torch.testing.assert_close(row["control_0"], found.controls[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(row["noise"], found.prepared[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


def test_xlabs_controlnets_see_pixels_and_draw_nothing(tiny_checkpoint: Checkpoint) -> None:
    family = Family.FLUX_INPAINT
    pipeline = oracle.loaded(tiny_checkpoint(family))
    (net, _) = nets(pipeline, conditioning_embedding_channels=16)
    found = caught(
        FluxControlNetInpaintPipeline,
        pipeline,
        net,
        **edit(Image.fromarray(IMAGES[0])),
    )
    model = model_of(family, tiny_checkpoint(family))
    shared, (row,) = controlled(model, control_input({"_class_name": "FluxControlNetModel", **net.config}))
    assert shared
    torch.testing.assert_close(row["control_0"], found.controls[0][0], rtol=1e-5, atol=1e-5)
    assert torch.equal(row["generator"], found.generator)


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
