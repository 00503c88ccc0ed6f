"""Tiny Flux transformers with random weights, and random rows for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata_denoiser.families.flux import FluxFill, FluxInpaint
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.families.sampling import FlowMatching, shifted_by_size
from giornata_denoiser.rows.row import Row, Snapshot

JOINT_DIM = 24
POOLED_DIM = 20
LATENT = 64
"""Channels of a packed token: 2x2 latent pixels of 16 channels."""
MASK = 256
"""Channels of Fill's mask: 16x16 pixels."""
SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
MIXING = 2.0
"""Random weights hardly mix tokens; projections scaled by this let a wrong key, position or modulation show,
and do not yet amplify rounding beyond 1e-5."""


def transformer(
    *, fill: bool = False, guidance: bool = True, seed: int = 0, heads: int = 4
) -> FluxTransformer2DModel:
    """Two double and two single blocks of 16 channels a head."""
    torch.manual_seed(seed)
    kind: Any = FluxTransformer2DModel
    model: FluxTransformer2DModel = kind(
        patch_size=1,
        in_channels=2 * LATENT + MASK if fill else LATENT,
        out_channels=LATENT,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=heads,
        joint_attention_dim=JOINT_DIM,
        pooled_projection_dim=POOLED_DIM,
        guidance_embeds=guidance,
        axes_dims_rope=(4, 6, 6),
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".attn." in name or ".linear." in name:
                weight.mul_(MIXING)
    model.eval().requires_grad_(requires_grad=False)
    return model


def family(
    network: FluxInpaint | FluxFill | None = None,
    *,
    fill: bool = False,
    guidance: bool = True,
    dtype: torch.dtype = torch.float32,
) -> ModelFamily:
    """The family of `network`; default one over a tiny transformer."""
    if network is None:
        model = transformer(fill=fill, guidance=guidance)
        torch.nn.Module.to(model, dtype)
        network = FluxFill(model) if fill else FluxInpaint(model)
    return ModelFamily(network.text, FlowMatching(SCHEDULER, shifted_by_size), network)


@dataclass(frozen=True)
class Spec:
    """What tests vary in a row."""

    job_id: str = "job"
    attempt: int = 1
    index: int = 0
    grid: tuple[int, int] = (3, 4)
    text_tokens: int = 5
    padding_tokens: int = 0
    """Text tokens that are padding; with any, a negative prompt has one more."""
    steps: int = 4
    strength: float = 1.0
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    partial_images: int = 0
    seed: int = 0


def inputs(of: ModelFamily, spec: Spec) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Text and conditioning tensors of a row, as prepost would send them."""
    generator = torch.Generator().manual_seed(spec.seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    text = {"prompt_embeds": random(spec.text_tokens, JOINT_DIM), "pooled_prompt_embeds": random(POOLED_DIM)}
    if spec.true_cfg_scale > 1:
        text["negative_prompt_embeds"] = random(spec.text_tokens + 2, JOINT_DIM)
        text["negative_pooled_prompt_embeds"] = random(POOLED_DIM)
    if spec.padding_tokens:
        text[PROMPT_MASK] = _mask(spec.text_tokens, spec.padding_tokens)
        if spec.true_cfg_scale > 1:
            text[f"negative_{PROMPT_MASK}"] = _mask(spec.text_tokens + 2, spec.padding_tokens + 1)
    tokens = spec.grid[0] * spec.grid[1]
    tensors = {name: random(tokens, channels) for name, channels in of.network.conditioning.items()}
    tensors["mask"] = (tensors["mask"] > 0).float()
    return text, tensors


def _mask(tokens: int, padding: int) -> Tensor:
    return (torch.arange(tokens) < tokens - padding).to(torch.uint8)


def row(of: ModelFamily, spec: Spec, resume: Snapshot | None = None) -> Row:
    """The row of `spec`; the same spec makes an equal row."""
    text, tensors = inputs(of, spec)
    return build_row(
        of,
        RowKey(spec.job_id, spec.attempt, spec.index),
        grid=spec.grid,
        track=of.schedule.track(
            sampler=of.schedule.default_sampler,
            steps=spec.steps,
            strength=spec.strength,
            cells=spec.grid[0] * spec.grid[1],
        ),
        text=text,
        conditioning=tensors,
        guidance_scale=spec.guidance_scale,
        true_cfg_scale=spec.true_cfg_scale,
        partial_images=spec.partial_images,
        resume=resume,
    )
