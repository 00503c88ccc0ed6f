"""The trained parts that work on tokens, together: both text encoders and the transformer.

One forward is what `FluxFillPipeline` computes for one step, from token ids and packed latents.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextModel, T5EncoderModel

from giornata_lab.model import latents
from giornata_lab.model.random.text_encoders import TextEncoders

UNGUIDED: Final = 1.0
"""The guidance at which the model is the plain conditional one."""


class Predictor(Protocol):
    """A painter, alone or with an adapter."""

    def read(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Painter.read`."""

    def __call__(
        self,
        noisy: torch.Tensor,
        condition: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        *,
        time: torch.Tensor,
        guidance: torch.Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """As `Painter.forward`."""


class Painter(nn.Module):
    """Predicts the velocity noise - picture (rectified flow, Liu et al., 2022)."""

    def __init__(self, transformer: FluxTransformer2DModel, text: TextEncoders) -> None:
        super().__init__()
        self.transformer: FluxTransformer2DModel = transformer
        self.clip: CLIPTextModel = text.clip
        self.t5: T5EncoderModel = text.t5

    def read(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings (rows, text tokens, width) of T5 and (rows, width) pooled of CLIP."""
        return self.t5(t5_ids)[0], self.clip(clip_ids).pooler_output

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
        """Velocity (rows, tokens, 32).

        Args:
            noisy: (rows, tokens, 32) latents at `time`.
            condition: (rows, tokens, 96) latents of the masked picture, and the mask.
            text: from `read`.
            time: (rows,) in [0, 1]; 1 is noise.
            guidance: (rows,) as requests name it.
            corner: row and column of the first token; training moves it, so that every position is seen.
        """
        velocity: torch.Tensor = self.transformer(
            hidden_states=torch.cat([noisy, condition], dim=-1),
            **beside_tokens(noisy, text, time=time, guidance=guidance, corner=corner),
        )[0]
        return velocity


def beside_tokens(
    noisy: torch.Tensor,
    text: tuple[torch.Tensor, torch.Tensor],
    *,
    time: torch.Tensor,
    guidance: torch.Tensor,
    corner: tuple[int, int],
) -> dict[str, Any]:
    """What a Flux network, ControlNets too, is told beside the picture's tokens; arguments as `Painter.forward`'s."""
    embeddings, pooled = text
    side = round(noisy.shape[1] ** 0.5)
    return {
        "encoder_hidden_states": embeddings,
        "pooled_projections": pooled,
        "timestep": time,
        "guidance": guidance,
        "img_ids": latents.positions(side, *corner).to(noisy),
        "txt_ids": torch.zeros(embeddings.shape[1], 3).to(noisy),
        "return_dict": False,
    }
