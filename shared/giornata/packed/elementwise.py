"""The work of transformer blocks on every token by itself, between products: pure functions over packed tokens.

Two implementations with one signature, chosen by :func:`choose`: torch's operations, and Triton's kernels
(:mod:`giornata.packed.kernels`), which read and write each tensor once. A sequence's modulation vectors apply to its
packed tokens, so that one launch serves the whole batch. Sums are in float32, and results are rounded to the dtype
where diffusers rounds them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.compute_set import Rotary
from giornata.packed.packing import Layout, Segments
from giornata.packed.pages import Gather, gather


class HeadNorm(NamedTuple):
    """An RMS norm of every head."""

    weight: Tensor
    """(head_dim,)"""
    eps: float


class QKVProjection(NamedTuple):
    """The queries, keys and values of one stream: (tokens, heads, head_dim) each, and the norms of the first two."""

    query: Tensor
    key: Tensor
    value: Tensor
    query_norm: HeadNorm
    key_norm: HeadNorm


@dataclass(frozen=True)
class ElementwiseOps:
    """The functions of one implementation."""

    modulated: Callable[[Tensor, Sequence[Tensor], Segments, float], Tensor]
    """adaLN: norm(x) * (1 + scale) + shift for x (tokens, channels), (shift, scale), segments and the norm's eps.

    Shift and scale are (sequences, channels), rows of any stride; the norm has no weights.
    """
    gated: Callable[[Tensor, Tensor, Tensor, Segments], Tensor]
    """x + gate * values for x and values (tokens, channels), gate (sequences, channels) and segments."""
    rotated: Callable[[Tensor, HeadNorm, Rotary], Tensor]
    """Norm and rotary embedding of (tokens, heads, head_dim), rows of any stride."""
    attended: Callable[[Sequence[QKVProjection], Layout, Rotary], tuple[Tensor, Tensor, Tensor]]
    """Query, key and value in joint order, (joint_tokens, heads, head_dim), the first two normed and rotated.

    The streams are text and image, or one that is in joint order already; their rows may have any stride.
    """
    beside_gelu: Callable[[Tensor, Tensor], Tensor]
    """(tokens, a + b): x (tokens, a), and GELU by its tanh approximation of y (tokens, b), rows of any stride."""
    gather: Gather
    """What is attended to and was stored."""


def choose_elementwise(device: torch.device, dtype: torch.dtype) -> ElementwiseOps:
    """The fastest implementation for tensors of `dtype` on `device`.

    Warns where Triton is here and cannot launch kernels: it builds them with the machine's C compiler.
    """
    if device.type != "cuda" or dtype == torch.float64 or find_spec("triton") is None:
        return TORCH
    from giornata.packed import kernels  # noqa: PLC0415 - torch's CUDA builds bring Triton, others do not

    try:
        kernels.launch(device)
    except Exception as error:  # noqa: BLE001 - of Triton, a compiler or a driver; told below, and there is another way
        warnings.warn(f"Triton launches nothing here, and steps take longer: {error!r}", stacklevel=2)
        return TORCH
    return kernels.TRITON


def modulated(x: Tensor, vectors: Sequence[Tensor], segments: Segments, eps: float) -> Tensor:
    """See :attr:`ElementwiseOps.modulated`."""
    shift, scale = vectors
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    return _per_token(_per_token(normed, 1 + scale, segments, torch.mul), shift, segments, torch.add)


def gated(x: Tensor, values: Tensor, gate: Tensor, segments: Segments) -> Tensor:
    """See :attr:`ElementwiseOps.gated`."""
    return x + _per_token(values, gate, segments, torch.mul)


def rotated(heads: Tensor, norm: HeadNorm, rotary: Rotary) -> Tensor:
    """See :attr:`ElementwiseOps.rotated`."""
    return rotate(F.rms_norm(heads, heads.shape[-1:], norm.weight, norm.eps), rotary)


def attended(
    streams: Sequence[QKVProjection], layout: Layout, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """See :attr:`ElementwiseOps.attended`."""
    if len(streams) == 1:
        (only,) = streams
        return (
            rotated(only.query, only.query_norm, rotary),
            rotated(only.key, only.key_norm, rotary),
            only.value,
        )
    text, image = streams
    query, key = (
        layout.join(*(F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps) for x, norm in of_part))
        for of_part in (
            ((text.query, text.query_norm), (image.query, image.query_norm)),
            ((text.key, text.key_norm), (image.key, image.key_norm)),
        )
    )
    return rotate(query, rotary), rotate(key, rotary), layout.join(text.value, image.value)


def beside_gelu(x: Tensor, y: Tensor) -> Tensor:
    """See :attr:`ElementwiseOps.beside_gelu`."""
    return torch.cat((x, F.gelu(y, approximate="tanh")), dim=1)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim), pairs of neighbouring channels as complex numbers, in float32.

    As `apply_rotary_emb` of diffusers, bit for bit.
    """
    cosine, sine = (part.unsqueeze(1) for part in rotary)
    real, imaginary = heads.reshape(*heads.shape[:-1], heads.shape[-1] // 2, 2).unbind(-1)
    turned = torch.stack((-imaginary, real), dim=-1).flatten(-2)
    return (heads.float() * cosine + turned.float() * sine).to(heads.dtype)


def _per_token(values: Tensor, vectors: Tensor, segments: Segments, combine: Callable[..., Tensor]) -> Tensor:
    """`values`, (tokens, channels), combined with the vector of each token's sequence.

    A CPU computes each sequence by itself; a GPU gathers a vector for every token, in one kernel.
    """
    if len(vectors) == 1:
        return combine(values, vectors)
    if values.device.type != "cpu":
        return combine(values, vectors.index_select(0, segments.sequence))
    out = torch.empty_like(values)
    for vector, (start, end) in zip(vectors, segments.bounds, strict=True):
        combine(values[start:end], vector, out=out[start:end])
    return out


TORCH = ElementwiseOps(modulated, gated, rotated, attended, beside_gelu, gather)
"""torch's operations, on any device."""
