"""The blocks of a driven transformer as values: multiplications are counted at their layers' weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import nn

from giornata.planning.specs import BlockSpec


def multiplications(*modules: nn.Module) -> float:
    """Of one token that passes all linear layers of these modules."""
    layers = (layer for module in modules for layer in module.modules())
    return float(sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)))


def spec(attn: Any, *, token: float, keys: float, sites: int = 1) -> BlockSpec:
    """A block; an image token takes `token` multiplications in all, its keys and values `keys` of them.

    A block with more `sites` than one attention keeps their heads side by side.
    """
    width = sites * int(attn.inner_dim)
    hidden = int(getattr(attn, "out_dim", attn.inner_dim))  # Qwen-Image 2.1's is as wide as its heads
    return BlockSpec(
        grain=1,
        heads=sites * int(attn.heads),
        parts={"key": width, "value": width, "hidden": hidden},
        cell=token,
        outside=keys,
        pair=2.0 * width,
    )


def counted(specs: Iterable[BlockSpec]) -> tuple[BlockSpec, ...]:
    """Equal neighbours as one spec that counts them."""
    runs = ((first, sum(1 for _ in run)) for first, run in groupby(specs))
    return tuple(replace(first, count=count) for first, count in runs)
