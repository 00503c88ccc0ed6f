"""UNet checkpoints: which are served, as what, and what their rows carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler

from giornata_denoiser.families.unet.network import UnetInpaint
from giornata_lab.bench.compute import tiny_unet
from tests.unit.denoiser.families.test_unet import (
    DOUBLE,
    EXACT,
    KINDS,
    L_SHAPE,
    pair,
    pictures,
    predicted,
    recorded,
    taking,
)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"in_channels": 5}, "5 input channels; served are"),
        ({"time_cond_proj_dim": 8}, "time_cond_proj_dim 8; served is None"),
        ({"resnet_time_scale_shift": "scale_shift"}, "resnet_time_scale_shift"),
        ({"class_embed_type": "timestep"}, "class_embed_type"),
    ],
)
def test_unets_of_other_kinds_are_refused(config: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        tiny_unet.network("sd", **config)


def test_a_unet_with_more_levels_than_its_tiles_have_is_refused() -> None:
    config: dict[str, Any] = {
        "block_out_channels": (8, 8, 8, 8),
        "down_block_types": ("DownBlock2D",) * 4,
        "up_block_types": ("UpBlock2D",) * 4,
        "transformer_layers_per_block": 1,
        "attention_head_dim": 1,
    }
    with pytest.raises(ValueError, match="tiles of 4 latent pixels are too small for 4 levels"):
        tiny_unet.network("xl", **config)


def test_smaller_unets_are_served_over_the_same_tiles() -> None:
    """As distilled ones are: fewer levels, and nothing in the middle."""
    config: dict[str, Any] = {
        "block_out_channels": (16, 32),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "mid_block_type": None,
        "dtype": DOUBLE,
    }
    model, of = tiny_unet.unet("sd", **config), tiny_unet.network("sd", **config)
    row = pictures(of)[0]
    whole = tiny_unet.alone(model, of, row)
    (out,) = predicted(of, [row], [L_SHAPE], [taking(of, recorded(of, [row])[0], L_SHAPE)])
    torch.testing.assert_close(out, whole[L_SHAPE.computed], atol=EXACT, rtol=0)


@pytest.mark.parametrize(("shape", "fill"), KINDS)
def test_a_checkpoint_is_loaded_as_the_network_that_it_holds(shape: str, fill: bool, tmp_path: Path) -> None:
    model = tiny_unet.unet(shape, fill=fill)
    model.save_pretrained(tmp_path / "unet")
    scheduler: Any = DDIMScheduler
    scheduler(clip_sample=False).save_pretrained(tmp_path / "scheduler")
    of: Any = UnetInpaint.load(tmp_path, torch.float32, torch.device("cpu")).network
    assert (of.blends, of.side) == (not fill, 4 if shape == "xl" else 8)
    row = pictures(of)[0]
    (out,) = predicted(of, [row], [None])
    torch.testing.assert_close(out, tiny_unet.alone(model, of, row), atol=1e-4, rtol=0)


@pytest.mark.parametrize("fill", [False, True])
def test_an_empty_mask_shows_the_picture(fill: bool) -> None:
    _, of = pair("xl", fill)
    conditioning = dict(pictures(of)[0].conditioning)
    empty = of.unmasked(conditioning)
    assert empty.keys() == conditioning.keys()
    assert not empty["mask"].any()
    if fill:
        assert torch.equal(empty["masked_image_latents"], conditioning["image_latents"])
    assert of.blends is not fill
