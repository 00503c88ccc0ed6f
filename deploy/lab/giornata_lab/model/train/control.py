"""The ControlNet that ships: `outline` tells a Flux-Fill place, size, turn and shape of what is painted.

It is a smaller copy of the network's first blocks (Zhang et al., ICCV 2023, 3.1), which sees the noisy latents and the
control image's, and no mask. Scenes are those whose masks tell none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
import torch
from diffusers import FluxControlNetModel, FluxTransformer2DModel
from torch import nn

from giornata_lab.model import latents
from giornata_lab.model.adapters import lessons
from giornata_lab.model.architecture import PATCH_CHANNELS
from giornata_lab.model.painter import UNGUIDED, Painter, beside_tokens
from giornata_lab.model.scenes import Scene
from giornata_lab.model.train.painter import (
    GREATEST,
    AdapterEncoder,
    FrozenFillCheckpoint,
    begin_on,
    flow_loss,
    load_frozen,
)
from giornata_lab.model.train.pool import SceneBatch, as_input
from giornata_lab.model.train.run import (
    CurriculumStage,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    in_blocks,
    optimisers,
)

DOUBLE, SINGLE = 1, 2
"""Blocks of the ControlNet: half of what the network has, so that each output serves two blocks."""
OUTLINE: Final = TrainingCurriculum(
    "outline",
    (CurriculumStage(0.55, {64: 1.0}), CurriculumStage(1.01, {64: 0.35, 128: 0.65})),
    rows={64: 40, 128: 12},
    rates=(2e-3, 3e-3),
    average_decay=0.98,
    source=lessons.sample_free,
)
GUIDANCES: Final = (UNGUIDED, GREATEST)
"""Least and greatest scale: one that it has not seen would break pictures, and an outline leaves little to guide."""


class ControlEncoder(AdapterEncoder):
    """Scenes as batches whose condition ends with the control image's latents: (rows, tokens, 96 + 32)."""

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """As `FillEncoder.encode`, with the outlines of what is asked for."""
        batch = super().encode(scenes)
        images = [lessons.control_image(scene.asked, len(scene.mask)) for scene in scenes]
        control = latents.encode(self.vae, as_input(torch.from_numpy(np.stack(images)), self.vae))
        packed = latents.pack(control).to(batch.condition)
        return replace(batch, condition=torch.cat([batch.condition, packed], dim=-1))


class ControlledPainter(nn.Module):
    """A frozen painter and a ControlNet that adds to its blocks."""

    def __init__(self, painter: Painter, net: FluxControlNetModel) -> None:
        super().__init__()
        self.painter: Painter = painter
        self.net: FluxControlNetModel = net

    def read(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Painter.read`."""
        return self.painter.read(clip_ids, t5_ids)

    def forward(
        self,
        noisy: torch.Tensor,
        condition: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        *,
        time: torch.Tensor,
        guidance: torch.Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """Velocity (rows, tokens, 32); `condition` is a `ControlEncoder`'s, all else as `Painter.forward`."""
        seen, control = condition[..., :-PATCH_CHANNELS], condition[..., -PATCH_CHANNELS:]
        told = beside_tokens(noisy, text, time=time, guidance=guidance, corner=corner)
        double, single = self.net(hidden_states=noisy, controlnet_cond=control, **told)
        velocity: torch.Tensor = self.painter.transformer(
            hidden_states=torch.cat([noisy, seen], dim=-1),
            controlnet_block_samples=double,
            controlnet_single_block_samples=single,
            **told,
        )[0]
        return velocity


def controlnet(transformer: FluxTransformer2DModel) -> FluxControlNetModel:
    """A ControlNet that begins with `transformer`'s first blocks and adds nothing yet."""
    config = transformer.config
    net = FluxControlNetModel(
        in_channels=PATCH_CHANNELS,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        patch_size=config.patch_size,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        joint_attention_dim=config.joint_attention_dim,
        pooled_projection_dim=config.pooled_projection_dim,
        guidance_embeds=config.guidance_embeds,
        axes_dims_rope=config.axes_dims_rope,
    )
    for name in ("time_text_embed", "context_embedder"):
        getattr(net, name).load_state_dict(getattr(transformer, name).state_dict())
    for name, blocks in (("transformer_blocks", DOUBLE), ("single_transformer_blocks", SINGLE)):
        getattr(net, name).load_state_dict(getattr(transformer, name)[:blocks].state_dict())
    embedder = transformer.x_embedder  # the noisy latents come first
    net.x_embedder.load_state_dict(
        {"weight": embedder.weight[:, :PATCH_CHANNELS].clone(), "bias": embedder.bias.clone()}
    )
    return net


def resumed(plan: StagePlan) -> tuple[TrainingRun[nn.Module], ControlledPainter]:
    """The run of ``outline.pt`` in the plan's folder, or a new one; and the painter of its averaged weights.

    Raises:
        Unusable: the state was trained for another model.
    """
    on: FrozenFillCheckpoint = load_frozen(plan)
    torch.manual_seed(plan.seed)
    net = controlnet(on.painter.transformer).to(plan.device)
    net.requires_grad_(requires_grad=True)
    encoder, weights = ControlEncoder(on.encoder), optimisers(net, in_blocks, OUTLINE.rates)
    run: TrainingRun[nn.Module] = TrainingRun(plan, OUTLINE, net, encoder, weights)
    begin_on(run, on)
    return run, ControlledPainter(on.painter, run.model)


def run(plan: StagePlan) -> None:
    """Train, going on from ``outline.pt`` in the plan's folder."""
    state, painter = resumed(plan)
    state.train(partial(flow_loss, painter, guidance=GUIDANCES))
