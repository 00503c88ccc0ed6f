"""The interior of a UNet: what its modules do within a forward, told by what that forward's batch is.

`UNet2DConditionModel.forward` runs unmodified. The modules that mix the cells of a picture, or tell items of the batch
apart, ask the pass that is under way. There are two kinds: over maps, as diffusers has it, and over tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from giornata_denoiser.families.unet.structure import Leaf, Structure


class Pass(Protocol):
    """One forward. Items are those of its batch: maps or tiles."""

    def convolution(self, leaf: Leaf, hidden: Tensor) -> Tensor:
        """A 3x3 convolution of (items, channels, height, width)."""

    def norm(self, leaf: Leaf, hidden: Tensor) -> Tensor:
        """A group norm over the whole picture of (items, channels, height, width)."""

    def attention(self, leaf: Leaf, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each item's cells over all cells of its picture; all are (items, cells, heads, head_dim)."""

    def text_attention(self, index: int, query: Tensor) -> Tensor:
        """The same over the item's text, in the attention of this index."""

    def modulation(self, start: int, end: int) -> Tensor:
        """(items, end - start): these channels of what the timestep adds to each item."""


class Interior:
    """The modules of one UNet, wired to the pass that is under way; one at a time."""

    def __init__(self, unet: Any, structure: Structure) -> None:
        self._unet = unet
        self._pass: Pass | None = None
        for leaf in structure.convolutions:
            leaf.module.forward = partial(self._convolution, leaf)
        for leaf in structure.norms:
            leaf.module.forward = partial(self._norm, leaf)
        for index, leaf in enumerate(structure.attentions):
            leaf.module.attn1.processor = PictureAttention(self, leaf)
            leaf.module.attn2.processor = TextAttention(self, index)
        start = 0
        for resnet in structure.resnets:
            end = start + resnet.time_emb_proj.out_features
            resnet.time_emb_proj.forward = partial(self._modulation, start, end)
            start = end
        # What becomes of the timestep is prepared for each row: within a forward it is nothing.
        for name in ("time_proj", "time_embedding", "add_time_proj", "add_embedding"):
            module = getattr(unet, name, None)
            if module is not None:
                module.forward = _nothing
        self._added = unet.config.addition_embed_type is not None

    @property
    def under_way(self) -> Pass:
        """The pass that the modules serve now."""
        if self._pass is None:
            raise RuntimeError("the UNet runs within a network's forward alone")
        return self._pass

    def run(self, through: Pass, sample: Tensor) -> Tensor:
        """The UNet's output, (items, out_channels, height, width), of (items, in_channels, height, width)."""
        none = sample.new_zeros(1, 1)
        self._pass = through
        try:
            out: Tensor = self._unet(
                sample,
                none[0],
                none[None],
                added_cond_kwargs={"text_embeds": none, "time_ids": none} if self._added else None,
                return_dict=False,
            )[0]
        finally:
            self._pass = None
        return out

    def _convolution(self, leaf: Leaf, hidden: Tensor) -> Tensor:
        return self.under_way.convolution(leaf, hidden)

    def _norm(self, leaf: Leaf, hidden: Tensor) -> Tensor:
        return self.under_way.norm(leaf, hidden)

    def _modulation(self, start: int, end: int, _embedding: Tensor) -> Tensor:
        return self.under_way.modulation(start, end)


def _nothing(*inputs: Tensor | None) -> Tensor:
    first = inputs[0]
    if first is None:
        raise TypeError("a timestep's module was called without one")
    return first.new_zeros(1, 1)


def attended(attn: Any, hidden: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """`attend` over the queries of diffusers' `Attention`, (items, cells, heads, head_dim), and its projection."""
    query = attn.to_q(hidden)
    mixed = attend(query.unflatten(-1, (attn.heads, -1)))
    out: Tensor = attn.to_out[1](attn.to_out[0](mixed.flatten(2)))
    return out


class PictureAttention:
    """Self-attention of a block; a processor of diffusers' `Attention`."""

    def __init__(self, interior: Interior, leaf: Leaf) -> None:
        self._interior, self._leaf = interior, leaf

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # noqa: ARG002 - diffusers' signature
        attention_mask: Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> Tensor:
        """(items, cells, channels)."""
        key, value = (to(hidden_states).unflatten(-1, (attn.heads, -1)) for to in (attn.to_k, attn.to_v))
        through, leaf = self._interior.under_way, self._leaf
        return attended(attn, hidden_states, lambda query: through.attention(leaf, query, key, value))


class TextAttention:
    """Cross-attention of a block over keys and values that each row has had since it joined."""

    def __init__(self, interior: Interior, index: int) -> None:
        self._interior, self._index = interior, index

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # noqa: ARG002 - diffusers' signature
        attention_mask: Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> Tensor:
        """(items, cells, channels)."""
        through, index = self._interior.under_way, self._index
        return attended(attn, hidden_states, lambda query: through.text_attention(index, query))
