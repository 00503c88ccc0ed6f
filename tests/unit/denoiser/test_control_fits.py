"""A denoiser refuses ControlNets that do not fit its network when it starts, and says what differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.control.mismatch import ControlMismatch
from giornata.wire.adapters import ControlWork
from giornata_denoiser.controls.networks import ControlNetTarget, controlled
from giornata_denoiser.controls.opening import open_controls
from tests.fakes import (
    tiny_driven,
    tiny_flux,
    tiny_flux_control,
    tiny_sd3_control,
    tiny_unet,
    tiny_unet_control,
)

PIXELS: Mapping[str, int] = {"flux": 16, "sd3": 16, "sd": 32, "xl": 16}
"""A token's, a side: a latent's pixel is eight of Flux and SD3, and four of these UNets, which have no autoencoder."""
XLABS: dict[str, Any] = {"conditioning_embedding_channels": tiny_flux.LATENT // 4, "patch_size": 2}


def network(name: str) -> ControlNetTarget:
    of: Any = tiny_unet.network(name, fill=name == "xl") if name in tiny_unet.SHAPES else None
    if of is None:
        of = (tiny_flux.family() if name == "flux" else tiny_driven.family(name)).network
    found = controlled(of, PIXELS[name])
    assert found is not None
    return found


def net(name: str, options: Mapping[str, Any]) -> Any:
    if name == "flux":
        return tiny_flux_control.net(**options)
    if name == "sd3":
        return tiny_sd3_control.net(tiny_driven.transformer("sd3").config, **options)
    return tiny_unet_control.net(name, **options)


def opened(folder: Path, of: str, kind: str, **options: Any) -> Any:
    net(kind, options).save_pretrained(folder / "edges")
    (found,) = open_controls(
        str(folder / "edges"), network(of), dtype=torch.float32, device=torch.device("cpu")
    ).values()
    return found


@pytest.mark.parametrize(
    ("of", "options"),
    [("flux", {}), ("flux", XLABS), ("sd3", {}), ("sd3", {"depth": 4}), ("sd", {}), ("xl", {})],
)
def test_one_that_fits_is_opened_with_its_work(of: str, options: dict[str, Any], tmp_path: Path) -> None:
    """UNets that see a mask take those that do not."""
    work = opened(tmp_path, of, of, **options).card.work
    assert isinstance(work, ControlWork)
    assert work.image > 0
    assert work.shared == (of == "flux")


@pytest.mark.parametrize(
    ("of", "kind", "options", "told"),
    [
        ("flux", "flux", XLABS | {"patch_size": 1}, "pixels of a token 8, and the model's 16"),
        ("flux", "flux", {"doubles": 3}, "double blocks 3, and the model's 2"),
        ("flux", "flux", {"singles": 4}, "single blocks 4, and the model's 2"),
        ("flux", "flux", {"pooled_projection_dim": 12}, "width of pooled text 12"),
        ("sd", "sd", {"scaled": 8}, "pixels of a token 64, and the model's 32"),
        ("xl", "xl", {"scaled": 2}, "pixels of a token 8, and the model's 16"),
        ("xl", "sd", {}, "width of pooled text None, and the model's 20"),
        ("sd", "sd", {"in_channels": 9}, "channels of latents 225, and the model's 256"),
        ("sd", "sd", {"cross_attention_dim": 32}, "width of text 32, and the model's 24"),
        ("sd", "sd", {"layers_per_block": 2}, "skip connections"),
        ("xl", "xl", {"block_out_channels": (16, 32, 64)}, "skip connections"),
        ("xl", "xl", {"projection_class_embeddings_input_dim": 60}, "width of pooled text 12"),
        ("sd3", "sd3", {"attention_head_dim": 32, "caption_projection_dim": 64}, "width of blocks 64"),
        ("sd3", "sd3", {"joint_attention_dim": 12}, "width of text 12"),
        ("sd3", "sd3", {"depth": 5}, "blocks 5, and the model's 4"),
        ("sd3", "sd3", {"in_channels": 8}, "channels of latents 32, and the model's 64"),
        ("sd3", "flux", {}, "is one of flux, and the model is of sd3"),
        ("xl", "sd3", {}, "is one of sd3, and the model is of unet"),
    ],
)
def test_one_that_does_not_fit_is_refused(
    of: str, kind: str, options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(ControlMismatch, match=told):
        opened(tmp_path, of, kind, **options)
