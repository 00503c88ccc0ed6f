"""What the denoiser reads of a checkpoint: its family, its autoencoder's colours, its scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoModel
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from giornata import families
from giornata.tensors import normalisation_of
from giornata_denoiser import checkpoint
from giornata_denoiser.families import preview_map
from giornata_denoiser.families.preview_map import board
from giornata_denoiser.families.sampling import flow_scheduler_config
from giornata_lab.bench.compute import tiny_flux

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "family", [families.Family.FLUX_INPAINT, families.Family.FLUX2_KLEIN, families.Family.QWEN_IMAGE]
)
def test_the_checkpoint_shows_latents_by_its_own_autoencoder(
    family: families.Family,
    tiny_checkpoint: Callable[[families.Family], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preview_map, "SIDE", 256)
    folder, scene = tiny_checkpoint(family), board()[..., ::4, ::4]
    monkeypatch.setattr(preview_map, "board", lambda: scene)
    seen = preview_map.fit_autoencoder(folder, CPU)
    vae = AutoModel.from_pretrained(str(folder), subfolder="vae")
    how = normalisation_of(vae)
    with torch.inference_mode():
        latents = how.normalised(vae, how.posterior(vae, 2 * scene - 1).latent_dist.mode())
        shown = seen(latents[0].float()).permute(2, 0, 1) / 255
    truth = torch.nn.functional.adaptive_avg_pool2d(scene, (shown.shape[1], shown.shape[2]))[0]
    constant = truth.mean((1, 2), keepdim=True)
    # Random weights keep little of a picture; a map of other latents (unscaled, mixed up) is worse than one colour.
    assert (shown - truth).square().mean() < 0.95 * (constant - truth).square().mean()


def test_a_family_without_a_network_is_refused_by_name(
    tiny_checkpoint: Callable[[families.Family], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(checkpoint.LOADERS, families.Family.FLUX_FILL)
    with pytest.raises(ValueError, match="of the family flux-fill; denoised are flux-inpaint"):
        checkpoint.load(tiny_checkpoint(families.Family.FLUX_FILL), dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"_class_name": "DDIMScheduler"}, "has a DDIMScheduler"),
        ({"stochastic_sampling": True}, "stochastic_sampling is not served"),
    ],
)
def test_a_scheduler_that_samples_otherwise_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    FlowMatchEulerDiscreteScheduler.from_config(tiny_flux.SCHEDULER).save_pretrained(tmp_path / "scheduler")
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        flow_scheduler_config(tmp_path)
