"""The blocks of a driven transformer as values: multiplications are counted at their layers' weights."""

from __future__ import annotations

from typing import Any

from torch import nn

from giornata.wire.blocks import BlockSpec


def multiplications(*modules: nn.Module) -> float:
    """Multiplications of one token that passes all linear layers of these modules."""
    layers = (layer for module in modules for layer in module.modules())
    return float(sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)))


def spec(attn: Any, *, image: float, text: float | None = None, keys: float, sites: int = 1) -> BlockSpec:
    """A block; an image token takes `image` multiplications in all, its keys and values `keys` of them.

    A text token takes `text`, by default as many as an image token; 0 where text is not attended to. A block with more
    `sites` than one attention keeps their heads side by side, and text is part of the first alone.
    """
    hidden = int(getattr(attn, "out_dim", attn.inner_dim))  # Qwen-Image 2.1's is as wide as its heads
    inner, of_text = int(attn.inner_dim), image if text is None else text
    return BlockSpec(
        heads=sites * int(attn.heads),
        parts={"key": sites * inner, "value": sites * inner, "hidden": hidden},
        linear=image,
        text=of_text,
        outside=keys,
        pair=2.0 * inner * sites,
        text_pair=2.0 * inner if of_text else 0.0,
    )
