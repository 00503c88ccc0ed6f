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

from giornata.packed.attention import Gather, gather
from giornata.packed.compute_set import Rotary
from giornata.packed.packing import Layout, Segments


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
    """See :attr:`ElementwiseOps.modulated`.

    A CPU computes each sequence by itself; a GPU gathers a vector for every token, in one kernel.
    """
    shift, scale = vectors
    scale = 1 + scale
    normed = F.layer_norm(x, x.shape[-1:], eps=eps)
    if len(shift) == 1:
        return normed * scale + shift
    if normed.device.type != "cpu":
        each = segments.sequence
        return normed * scale.index_select(0, each) + shift.index_select(0, each)
    parts = normed.split_with_sizes(segments.lengths)
    for part, by, plus in zip(parts, scale.unbind(), shift.unbind(), strict=True):
        part.mul_(by).add_(plus)
    return normed


def gated(x: Tensor, values: Tensor, gate: Tensor, segments: Segments) -> Tensor:
    """See :attr:`ElementwiseOps.gated`."""
    if len(gate) == 1:
        return x + values * gate
    if values.device.type != "cpu":
        return x + values * gate.index_select(0, segments.sequence)
    out, lengths = torch.empty_like(values), segments.lengths
    parts = zip(values.split_with_sizes(lengths), gate.unbind(), out.split_with_sizes(lengths), strict=True)
    for part, by, into in parts:
        torch.mul(part, by, out=into)
    return x + out


def rotated(heads: Tensor, norm: HeadNorm, rotary: Rotary) -> Tensor:
    """See :attr:`ElementwiseOps.rotated`."""
    return rotate(F.rms_norm(heads, heads.shape[-1:], norm.weight, norm.eps), rotary)


def attended(
    streams: Sequence[QKVProjection], layout: Layout, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """See :attr:`ElementwiseOps.attended`."""
    queries, keys = [], []
    for each in streams:
        width = each.query.shape[-1:]
        queries.append(F.rms_norm(each.query, width, each.query_norm.weight, each.query_norm.eps))
        keys.append(F.rms_norm(each.key, width, each.key_norm.weight, each.key_norm.eps))
    if len(streams) == 1:
        return rotate(queries[0], rotary), rotate(keys[0], rotary), streams[0].value
    text, image = streams
    query, key = layout.join(queries[0], queries[1]), layout.join(keys[0], keys[1])
    return rotate(query, rotary), rotate(key, rotary), layout.join(text.value, image.value)


def beside_gelu(x: Tensor, y: Tensor) -> Tensor:
    """See :attr:`ElementwiseOps.beside_gelu`."""
    return torch.cat((x, F.gelu(y, approximate="tanh")), dim=1)


def rotate(heads: Tensor, rotary: Rotary) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim), pairs of neighbouring channels as complex numbers, in float32.

    As `apply_rotary_emb` of diffusers, bit for bit.
    """
    cosine, sine = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
    real, imaginary = heads.reshape(*heads.shape[:-1], heads.shape[-1] // 2, 2).unbind(-1)
    turned = torch.stack((-imaginary, real), dim=-1).flatten(-2)
    return (heads.float() * cosine + turned.float() * sine).to(heads.dtype)


TORCH = ElementwiseOps(modulated, gated, rotated, attended, beside_gelu, gather)
"""torch's operations, on any device."""
