"""How tokens attend in driven blocks: processors of diffusers' attention modules, the only place where tokens meet."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from giornata_denoiser.families.driven.forward import AttentionSite, TokenStream
from giornata_denoiser.families.driven.hooks import TransformerHooks


class JointAttention:
    """Attention of two streams with projections of their own: a processor of diffusers' attention modules."""

    def __init__(self, hooks: TransformerHooks, site: AttentionSite) -> None:
        self._hooks, self._site = hooks, site

    def __call__(  # noqa: D102, PLR0917 - as diffusers'
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' modules; padding is dropped
        encoder_hidden_states_mask: None = None,  # noqa: ARG002 - as above
        image_rotary_emb: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
    ) -> tuple[Tensor, Tensor]:
        hooks, layout = self._hooks, self._hooks.forward.tokens.now.layout
        image = projected(attn, hidden_states)
        text = (
            by_head(attn, attn.add_q_proj(encoder_hidden_states), attn.norm_added_q),
            by_head(attn, attn.add_k_proj(encoder_hidden_states), attn.norm_added_k),
            by_head(attn, attn.add_v_proj(encoder_hidden_states)),
        )
        query, key, value = (layout.join(*parts) for parts in zip(text, image, strict=True))
        query, key = hooks.rotated(query, TokenStream.JOINT), hooks.rotated(key, TokenStream.JOINT)
        attended = hooks.forward.attended(self._site, TokenStream.JOINT, query, key, value)
        of_text, of_image = (
            batched_as(hidden, part)
            for hidden, part in zip(
                (encoder_hidden_states, hidden_states), layout.split(attended), strict=True
            )
        )
        to_text = attn.to_add_out
        return attn.to_out[0](of_image), of_text if to_text is None else to_text(of_text)


class SelfAttention:
    """Attention of one stream: a processor of diffusers' attention modules."""

    def __init__(self, hooks: TransformerHooks, site: AttentionSite, stream: TokenStream) -> None:
        self._hooks, self._site, self._stream = hooks, site, stream

    def __call__(  # noqa: D102, PLR0917 - as diffusers'
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: None = None,  # noqa: ARG002 - of diffusers' modules
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' blocks; padding is dropped
        freqs_cis: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
        image_rotary_emb: None = None,  # noqa: ARG002 - as above
    ) -> Tensor:
        attended = self.attended(hidden_states, *projected(attn, hidden_states))
        to_out = getattr(attn, "to_out", None)
        return attended if to_out is None else to_out[0](attended)

    def attended(self, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(tokens, heads, head_dim) each, normed → (items, tokens of each, channels), as `hidden` is."""
        hooks, stream = self._hooks, self._stream
        query, key = hooks.rotated(query, stream), hooks.rotated(key, stream)
        found = hooks.forward.attended(self._site, stream, query, key, value)
        return batched_as(hidden, found)


class ParallelAttention(SelfAttention):
    """Attention beside a feed-forward, whose projections are one layer."""

    def __call__(  # type: ignore[override]  # noqa: D102 - as diffusers', without a second stream
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: None = None,  # noqa: ARG002 - of diffusers' modules; nothing is padded
        image_rotary_emb: None = None,  # noqa: ARG002 - of diffusers' blocks; positions are the forward's
    ) -> Tensor:
        sizes = [*[attn.inner_dim] * 3, attn.mlp_hidden_dim * attn.mlp_mult_factor]
        *heads, mlp = attn.to_qkv_mlp_proj(hidden_states).split(sizes, dim=-1)
        query, key, value = (by_head(attn, part) for part in heads)
        attended = self.attended(hidden_states, attn.norm_q(query), attn.norm_k(key), value)
        out: Tensor = attn.to_out(torch.cat((attended, attn.mlp_act_fn(mlp)), dim=-1))
        return out


def projected(attn: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of (items, tokens of each, channels): (tokens, heads, head_dim), the first two normed."""
    return (
        by_head(attn, attn.to_q(hidden), attn.norm_q),
        by_head(attn, attn.to_k(hidden), attn.norm_k),
        by_head(attn, attn.to_v(hidden)),
    )


def by_head(attn: Any, projection: Tensor, norm: Any = None) -> Tensor:
    """(items, tokens of each, channels) → (tokens, heads, head_dim), normed if there is a norm."""
    *items, channels = projection.shape
    heads = projection.view(math.prod(items), attn.heads, channels // attn.heads)
    return heads if norm is None else norm(heads)


def batched_as(hidden: Tensor, tokens: Tensor) -> Tensor:
    """(tokens, channels) → (items, tokens of each, channels), with the items of `hidden`."""
    items, each, _ = hidden.shape
    return tokens.view(items, each, tokens.shape[1])
