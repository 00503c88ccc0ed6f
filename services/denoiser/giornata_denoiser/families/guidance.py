"""Classifier-free guidance of outputs. Pure.

Source: "Classifier-Free Diffusion Guidance", Ho and Salimans 2022, as diffusers' pipelines compute it.
"""

from __future__ import annotations

from torch import Tensor


def guided(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """negative + scale * (positive - negative).

    `positive` and `negative` are outputs with the prompt and with the negative prompt, (tokens, channels) each; `scale`
    is (tokens, 1) float32, and the result has the outputs' dtype.
    """
    return beyond(negative, positive, negative, scale)


def beyond(start: Tensor, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """start + scale * (positive - negative), for pipelines that count from another output than the negative one."""
    return start + (scale * (positive - negative).float()).to(positive.dtype)
