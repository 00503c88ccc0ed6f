"""The interior of a UNet: what its modules do within a forward, told by what that forward's batch is.

`UNet2DConditionModel.forward` runs unmodified. The modules that mix the cells of a picture, or tell items of the batch
apart, ask the pass that is under way. There are two kinds: over maps, as diffusers has it, and over tiles.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from giornata_denoiser.families.unet.joining import SequenceResiduals, UnetResidualHooks
from giornata_denoiser.families.unet.structure import LeafModule, UnetStructure


class UnetPass(Protocol):
    """One forward. Items are those of its batch: maps or tiles."""

    def convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A 3x3 convolution of (items, channels, height, width)."""

    def norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        """A group norm over the whole picture of (items, channels, height, width)."""

    def attention(self, leaf: LeafModule, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each item's cells over all cells of its picture; all are (items, cells, heads, head_dim)."""

    def text_attention(self, index: int, query: Tensor) -> Tensor:
        """The same over the item's text, in the attention of this index."""

    def modulation(self, start: int, end: int) -> Tensor:
        """(items, end - start): these channels of what the timestep adds to each item."""


class UnetHooks:
    """The modules of one UNet, wired to the pass that is under way; one at a time."""

    def __init__(self, unet: Any, structure: UnetStructure) -> None:
        self._unet = unet
        self._pass: UnetPass | None = None
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
        self._joining = UnetResidualHooks(unet)
        self._added = unet.config.addition_embed_type is not None

    @property
    def under_way(self) -> UnetPass:
        """The pass that the modules serve now."""
        if self._pass is None:
            raise RuntimeError("the UNet runs within a network's forward alone")
        return self._pass

    def run(self, through: UnetPass, sample: Tensor, joined: Sequence[SequenceResiduals] = ()) -> Tensor:
        """The UNet's output, (items, out_channels, height, width), of (items, in_channels, height, width).

        What is `joined` is added before the decoder.
        """
        none = sample.new_zeros(1, 1)
        self._pass, self._joining.now = through, joined
        try:
            out: Tensor = self._unet(
                sample,
                none[0],
                none[None],
                added_cond_kwargs={"text_embeds": none, "time_ids": none} if self._added else None,
                return_dict=False,
            )[0]
        finally:
            self._pass, self._joining.now = None, ()
        return out

    def _convolution(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        return self.under_way.convolution(leaf, hidden)

    def _norm(self, leaf: LeafModule, hidden: Tensor) -> Tensor:
        return self.under_way.norm(leaf, hidden)

    def _modulation(self, start: int, end: int, _embedding: Tensor) -> Tensor:
        return self.under_way.modulation(start, end)


def _nothing(*inputs: Tensor | None) -> Tensor:
    first = inputs[0]
    if first is None:
        raise TypeError("a timestep's module was called without one")
    return first.new_zeros(1, 1)


class UnetAttentionProcessor(ABC):
    """An attention of a block that asks the pass under way: a processor of diffusers' `UnetAttentionProcessor`."""

    def __init__(self, interior: UnetHooks) -> None:
        self._interior = interior

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,  # noqa: ARG002 - diffusers' signature
        attention_mask: Tensor | None = None,  # noqa: ARG002 - likewise
    ) -> Tensor:
        """(items, cells, channels)."""
        query = by_head(attn, attn.to_q(hidden_states))
        mixed = self.attend(self._interior.under_way, attn, query, hidden_states)
        out: Tensor = attn.to_out[1](attn.to_out[0](mixed.flatten(2)))
        return out

    @abstractmethod
    def attend(self, through: UnetPass, attn: Any, query: Tensor, hidden: Tensor) -> Tensor:
        """What `query` finds, both (items, cells, heads, head_dim); `hidden` is (items, cells, channels)."""


class PictureAttention(UnetAttentionProcessor):
    """Each cell over its picture's cells."""

    def __init__(self, interior: UnetHooks, leaf: LeafModule) -> None:
        super().__init__(interior)
        self._leaf = leaf

    def attend(self, through: UnetPass, attn: Any, query: Tensor, hidden: Tensor) -> Tensor:
        """See :class:`UnetAttentionProcessor`."""
        key, value = by_head(attn, attn.to_k(hidden)), by_head(attn, attn.to_v(hidden))
        return through.attention(self._leaf, query, key, value)


class TextAttention(UnetAttentionProcessor):
    """Each cell over keys and values of the text, which a row has from when it joins."""

    def __init__(self, interior: UnetHooks, index: int) -> None:
        super().__init__(interior)
        self._index = index

    def attend(self, through: UnetPass, attn: Any, query: Tensor, hidden: Tensor) -> Tensor:  # noqa: ARG002 - of the picture's
        """See :class:`UnetAttentionProcessor`."""
        return through.text_attention(self._index, query)


def by_head(attn: Any, projection: Tensor) -> Tensor:
    """(items, cells, channels) → (items, cells, heads, head_dim)."""
    return projection.reshape(*projection.shape[:2], attn.heads, -1)
