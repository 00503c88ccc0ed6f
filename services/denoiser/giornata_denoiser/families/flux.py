"""One packed forward of `FluxTransformer2DModel` over many sequences.

Its sub-modules are called as they are; only what mixes tokens or sequences is written here: the modulation,
computed per sequence and gathered per token, and the attention, over each sequence's own keys. It equals the
module's own `forward` of each sequence alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from torch import Tensor

from giornata_denoiser.attention import choose
from giornata_denoiser.families.protocol import Rotary, Sequences
from giornata_denoiser.sigmas import TRAIN_TIMESTEPS

PATCH = 2
"""Latent pixels a side of a token."""
ROTARY_CACHE = 64
"""Rotary embeddings kept, one per picture size and text length: 4.7 MB for 1024x1024 pixels."""


class PackedFlux:
    """The transformer of Flux checkpoints over packed sequences."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer: Any = transformer
        self.device: torch.device = transformer.device
        self.dtype: torch.dtype = transformer.dtype
        self._attend = choose(self.device, self.dtype)
        self.rotary = lru_cache(maxsize=ROTARY_CACHE)(self._rotary)

    @property
    def in_channels(self) -> int:
        """Channels of an image token that the transformer takes."""
        return int(self.transformer.config.in_channels)

    @property
    def out_channels(self) -> int:
        """Channels of an image token's velocity."""
        return int(self.transformer.out_channels)

    @property
    def prompt_channels(self) -> tuple[int, int]:
        """Channels of prompt embeddings and of pooled prompt embeddings."""
        config = self.transformer.config
        return int(config.joint_attention_dim), int(config.pooled_projection_dim)

    def velocity(self, sequences: Sequences, image: Tensor, timestep: Tensor) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Family.velocity`."""
        model, layout = self.transformer, sequences.layout
        conditioning = self._conditioning(sequences, timestep)
        image = model.x_embedder(image)
        text = model.context_embedder(sequences.text)
        for block in model.transformer_blocks:
            text, image = self._double_block(block, text, image, conditioning, sequences)
        joint = layout.join(text, image)
        for block in model.single_transformer_blocks:
            joint = self._single_block(block, joint, conditioning, sequences)
        image = joint.index_select(0, layout.image_positions)
        scale, shift = _modulation(model.norm_out, conditioning, 2, layout.image_sequence)
        return _as_tensor(model.proj_out(_modulated(model.norm_out.norm(image), shift, scale)))

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """See :meth:`giornata_denoiser.families.protocol.Family.unpacked`; the inverse of `_pack_latents`."""
        height, width = grid
        patches = latent.view(height, width, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        return patches.reshape(-1, height * PATCH, width * PATCH)

    def _rotary(self, text_tokens: int, grid: tuple[int, int]) -> Rotary:
        """Text is at (0, 0, 0); the image token of line y and column x at (0, y, x)."""
        ids = torch.zeros(text_tokens + grid[0] * grid[1], 3, device=self.device)
        ids[text_tokens:, 1] = torch.arange(grid[0], device=self.device).repeat_interleave(grid[1])
        ids[text_tokens:, 2] = torch.arange(grid[1], device=self.device).repeat(grid[0])
        cosine, sine = self.transformer.pos_embed(ids)
        return cosine, sine

    def _conditioning(self, sequences: Sequences, timestep: Tensor) -> Tensor:
        """(sequences, inner_dim): what modulates every block. Rounds to the dtype where diffusers does."""
        model = self.transformer
        scaled = [timestep.to(self.dtype) / TRAIN_TIMESTEPS * TRAIN_TIMESTEPS]
        if model.config.guidance_embeds:
            scaled.append(sequences.guidance.to(self.dtype) * TRAIN_TIMESTEPS)
        return _as_tensor(model.time_text_embed(*scaled, sequences.pooled))

    def _double_block(
        self, block: Any, text: Tensor, image: Tensor, conditioning: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """`FluxTransformerBlock`: text and image stream with weights of their own and one attention."""
        layout = sequences.layout
        image_mod = _modulation(block.norm1, conditioning, 6, layout.image_sequence)
        text_mod = _modulation(block.norm1_context, conditioning, 6, layout.text_sequence)
        attended_text, attended_image = self._joint_attention(
            block.attn,
            _modulated(block.norm1_context.norm(text), *text_mod[:2]),
            _modulated(block.norm1.norm(image), *image_mod[:2]),
            sequences,
        )
        image = _feed_forward(image + image_mod[2] * attended_image, block.norm2, block.ff, image_mod[3:])
        text = _feed_forward(
            text + text_mod[2] * attended_text, block.norm2_context, block.ff_context, text_mod[3:]
        )
        return text, image

    def _single_block(self, block: Any, joint: Tensor, conditioning: Tensor, sequences: Sequences) -> Tensor:
        """`FluxSingleTransformerBlock`: attention and MLP side by side on the joint order."""
        shift, scale, gate = _modulation(block.norm, conditioning, 3, sequences.layout.joint_sequence)
        normed = _modulated(block.norm.norm(joint), shift, scale)
        attn = block.attn
        query, key, value = (_heads(project(normed), attn) for project in (attn.to_q, attn.to_k, attn.to_v))
        attended = self._attention(attn.norm_q(query), attn.norm_k(key), value, sequences)
        mlp = block.act_mlp(block.proj_mlp(normed))
        return joint + gate * _as_tensor(block.proj_out(torch.cat((attended, mlp), dim=1)))

    def _joint_attention(
        self, attn: Any, text: Tensor, image: Tensor, sequences: Sequences
    ) -> tuple[Tensor, Tensor]:
        """Attention of a double block: both streams are projected apart and attend together."""
        join = sequences.layout.join
        query = join(
            attn.norm_added_q(_heads(attn.add_q_proj(text), attn)),
            attn.norm_q(_heads(attn.to_q(image), attn)),
        )
        key = join(
            attn.norm_added_k(_heads(attn.add_k_proj(text), attn)),
            attn.norm_k(_heads(attn.to_k(image), attn)),
        )
        value = join(_heads(attn.add_v_proj(text), attn), _heads(attn.to_v(image), attn))
        text, image = sequences.layout.split(self._attention(query, key, value, sequences))
        return attn.to_add_out(text), attn.to_out[1](attn.to_out[0](image))

    def _attention(self, query: Tensor, key: Tensor, value: Tensor, sequences: Sequences) -> Tensor:
        """Each sequence over its own keys: (joint_tokens, heads, head_dim) → (joint_tokens, inner_dim).

        The one place where a token meets others.
        """
        segments = sequences.layout.joint
        query, key = _rotate(query, sequences.rotary), _rotate(key, sequences.rotary)
        return self._attend(query, key, value, segments, segments).flatten(1)


def _modulation(norm: Any, conditioning: Tensor, parts: int, sequence: Tensor) -> tuple[Tensor, ...]:
    """adaLN: `parts` vectors per sequence, gathered per token (or broadcast, where there is one sequence).

    Args:
        norm: the module that holds `linear`.
        conditioning: (sequences, inner_dim).
        parts: how many vectors `linear` makes.
        sequence: (tokens,) sequence of each token.
    """
    vectors: tuple[Tensor, ...] = norm.linear(norm.silu(conditioning)).chunk(parts, dim=1)
    if len(conditioning) == 1:
        return vectors
    return tuple(vector.index_select(0, sequence) for vector in vectors)


def _modulated(normed: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return normed * (1 + scale) + shift


def _feed_forward(hidden: Tensor, norm: Any, feed_forward: Any, modulation: tuple[Tensor, ...]) -> Tensor:
    """The residual MLP of a double block; `modulation` is (shift, scale, gate)."""
    shift, scale, gate = modulation
    return hidden + gate * _as_tensor(feed_forward(_modulated(norm(hidden), shift, scale)))


def _heads(projected: Tensor, attn: Any) -> Tensor:
    """(tokens, inner_dim) → (tokens, heads, head_dim)."""
    return projected.view(len(projected), -1, attn.head_dim)


def _rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim), by diffusers' own function."""
    rotated: Any = apply_rotary_emb(heads.unsqueeze(0), rotary, sequence_dim=1)
    return _as_tensor(rotated).squeeze(0)


def _as_tensor(value: Any) -> Tensor:
    """`value`, typed: diffusers' modules are not."""
    if not isinstance(value, Tensor):
        raise TypeError(f"expected a tensor, received {type(value).__name__}")
    return value
