"""The values that settings of a denoiser choose between. Free of torch: settings are judged before it loads."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

EXACT: Final = 0
"""No bits: a tensor is kept in the dtype that it was computed in."""
BITS: Final = (EXACT, 8, 4)
"""Bits of recorded values."""


class CacheForm(StrEnum):
    """The form in which a block's output is kept for every token."""

    KV = "kv"
    """Keys, after norm and rotary embedding, and values."""
    HIDDEN = "hidden"
    """The block's input: half the bytes, projected again by every edit."""


class ControlNetExecutor(StrEnum):
    """The process that computes ControlNets."""

    AUTO = "auto"
    """Whoever is predicted to hold up the row's steps the least."""
    LOCAL = "local"
    """This process, where it has them all."""
    SERVICE = "service"
    """An instance of the ControlNet service, where one has them all."""


class WeightQuantization(StrEnum):
    """The number format in which a denoiser keeps the weights of its network's blocks."""

    OFF = "off"
    """In those of the model's dtype."""
    INT8 = "int8"
    """Integers of 8 bits."""
    FLOAT8 = "float8"
    """Floating-point numbers of 8 bits, e4m3."""
