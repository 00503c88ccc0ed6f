"""Tiny UNets with random weights, sequences for them, and recordings, as the benches have them."""

from __future__ import annotations

from giornata_lab.bench.compute.tiny_unet import (
    CROSS,
    MIXING,
    POOLED,
    SD,
    SHAPES,
    XL,
    Everything,
    alone,
    drawn,
    inputs,
    network,
    picture,
    unet,
)
from giornata_lab.bench.compute.tiny_unet import (
    RecordedUnetTokens as Recorded,
)
from giornata_lab.bench.compute.tiny_unet import (
    UnetPicture as Picture,
)

__all__ = [
    "CROSS",
    "MIXING",
    "POOLED",
    "SD",
    "SHAPES",
    "XL",
    "Everything",
    "Picture",
    "Recorded",
    "alone",
    "drawn",
    "inputs",
    "network",
    "picture",
    "unet",
]
