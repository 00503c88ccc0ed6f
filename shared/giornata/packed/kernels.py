"""The functions of :mod:`giornata.packed.elementwise` as Triton kernels: a token a program, each tensor read once.

Triton's interpreter (`TRITON_INTERPRET=1`, set before the import) runs them on a CPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from giornata.packed.elementwise import ElementwiseOps, HeadNorm, QKVProjection
from giornata.packed.packing import Layout, Segments
from giornata.packed.page_kernels import gather
from giornata.packed.region import Rotary

# Kernels read and write rows of any stride, in elements; channels are contiguous. Triton reads the annotations of
# constants and cannot read others. What differs from step to step is not specialised: a variant is compiled when it is
# first launched, and the denoiser's rehearsal launches all.


@triton.jit(do_not_specialize_on_alignment=["sequence"])
def _modulate(
    x,
    shift,
    scale,
    sequence,
    out,
    x_stride,
    shift_stride,
    scale_stride,
    eps,
    ONE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    of = tl.full((), 0, tl.int64) if ONE else tl.load(sequence + token)
    values = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(values) / CHANNELS
    centred = tl.where(inside, values - mean, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / CHANNELS + eps)
    dtype = out.dtype.element_ty
    factor = tl.load(scale + of * scale_stride + channel, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(shift + of * shift_stride + channel, mask=inside, other=0.0).to(tl.float32)
    scaled = normed.to(dtype).to(tl.float32) * (1.0 + factor).to(dtype).to(tl.float32)
    tl.store(
        out + token * CHANNELS + channel, (scaled.to(dtype).to(tl.float32) + added).to(dtype), mask=inside
    )


@triton.jit(do_not_specialize_on_alignment=["sequence"])
def _gate(
    x,
    values,
    gate,
    sequence,
    out,
    x_stride,
    values_stride,
    gate_stride,
    ONE: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    of = tl.full((), 0, tl.int64) if ONE else tl.load(sequence + token)
    dtype = out.dtype.element_ty
    factor = tl.load(gate + of * gate_stride + channel, mask=inside, other=0.0).to(tl.float32)
    change = tl.load(values + token * values_stride + channel, mask=inside, other=0.0).to(tl.float32) * factor
    before = tl.load(x + token * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + token * CHANNELS + channel, (before + change.to(dtype).to(tl.float32)).to(dtype), mask=inside
    )


@triton.jit
def _normed_and_turned(
    heads,
    weight,
    cosine,
    sine,
    out,
    token,
    position,
    stride,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    """All heads of one token: RMS norm, rounded, then the rotation, rounded."""
    head, channel = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, WIDTH_BLOCK)[None, :]
    inside = (head < HEADS) & (channel < WIDTH)
    partner = channel ^ 1  # the other half of the complex number
    row = heads + token * stride + head * WIDTH
    own = tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    length = tl.rsqrt(tl.sum(own * own, axis=1) / WIDTH + eps)[:, None]
    within = channel < WIDTH
    own_weight = tl.load(weight + channel, mask=within, other=0.0).to(tl.float32)
    other_weight = tl.load(weight + partner, mask=within, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    own = (own * length * own_weight).to(dtype).to(tl.float32)
    other = (other * length * other_weight).to(dtype).to(tl.float32)
    turned = tl.where(channel % 2 == 0, -other, other)
    along = tl.load(cosine + position * WIDTH + channel, mask=within, other=0.0)
    across = tl.load(sine + position * WIDTH + channel, mask=within, other=0.0)
    tl.store(
        out + position * HEADS * WIDTH + head * WIDTH + channel,
        (own * along + turned * across).to(dtype),
        mask=inside,
    )


@triton.jit(do_not_specialize_on_alignment=["positions"])
def _rotate(
    query,
    key,
    value,
    query_weight,
    key_weight,
    positions,
    cosine,
    sine,
    query_out,
    key_out,
    value_out,
    query_stride,
    key_stride,
    value_stride,
    query_eps,
    key_eps,
    HAS_QUERY: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    MOVES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token) if MOVES else token
    if HAS_QUERY:
        _normed_and_turned(
            query, query_weight, cosine, sine, query_out, token, position, query_stride, query_eps,
            HEADS, WIDTH, HEAD_BLOCK, WIDTH_BLOCK,
        )  # fmt: skip
    _normed_and_turned(
        key, key_weight, cosine, sine, key_out, token, position, key_stride, key_eps,
        HEADS, WIDTH, HEAD_BLOCK, WIDTH_BLOCK,
    )  # fmt: skip
    if HAS_VALUE:
        head, channel = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, WIDTH_BLOCK)[None, :]
        inside = (head < HEADS) & (channel < WIDTH)
        place = head * WIDTH + channel
        carried = tl.load(value + token * value_stride + place, mask=inside, other=0.0)
        tl.store(value_out + position * HEADS * WIDTH + place, carried, mask=inside)


@triton.jit
def _gelu_beside(
    x,
    y,
    out,
    x_stride,
    y_stride,
    X_CHANNELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = channel < X_CHANNELS
    second = (channel >= X_CHANNELS) & (channel < CHANNELS)
    kept = tl.load(x + token * x_stride + channel, mask=first, other=0.0).to(tl.float32)
    entering = tl.load(y + token * y_stride + channel - X_CHANNELS, mask=second, other=0.0).to(tl.float32)
    inner = 0.7978845608028654 * (entering + 0.044715 * entering * entering * entering)
    # tanh(a) = 1 - 2 / (1 + exp(2 a)), which overflows to the right limits
    gelu = entering * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))
    tl.store(
        out + token * CHANNELS + channel,
        tl.where(first, kept, gelu).to(out.dtype.element_ty),
        mask=channel < CHANNELS,
    )


def modulated(x: Tensor, vectors: Sequence[Tensor], segments: Segments, eps: float) -> Tensor:
    """See :attr:`giornata.packed.elementwise.ElementwiseOps.modulated`."""
    shift, scale = vectors
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    one = len(shift) == 1
    block = triton.next_power_of_2(channels)
    _modulate[(tokens,)](
        x, shift, scale, x if one else segments.sequence, out,
        x.stride(0), shift.stride(0), scale.stride(0), eps,
        ONE=one, CHANNELS=channels, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out


def gated(x: Tensor, values: Tensor, gate: Tensor, segments: Segments) -> Tensor:
    """See :attr:`giornata.packed.elementwise.ElementwiseOps.gated`."""
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    one = len(gate) == 1
    block = triton.next_power_of_2(channels)
    _gate[(tokens,)](
        x, values, gate, x if one else segments.sequence, out,
        x.stride(0), values.stride(0), gate.stride(0),
        ONE=one, CHANNELS=channels, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out


def rotated(heads: Tensor, norm: HeadNorm, rotary: Rotary) -> Tensor:
    """See :attr:`giornata.packed.elementwise.ElementwiseOps.rotated`."""
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    alone = QKVProjection(heads, heads, heads, norm, norm)
    _launch(alone, None, rotary, (out, out, out), query=False, value=False)
    return out


def attended(
    streams: Sequence[QKVProjection], layout: Layout, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """See :attr:`giornata.packed.elementwise.ElementwiseOps.attended`."""
    first = streams[0]
    tokens = sum(len(stream.query) for stream in streams)
    shape = (tokens, *first.query.shape[1:])
    query, key = (torch.empty(shape, dtype=first.query.dtype, device=first.query.device) for _ in range(2))
    if len(streams) == 1:
        _launch(first, None, rotary, (query, key, key), query=True, value=False)
        return query, key, first.value
    value = torch.empty_like(query)
    for stream, positions in zip(streams, (layout.text_positions, layout.image_positions), strict=True):
        _launch(stream, positions, rotary, (query, key, value), query=True, value=True)
    return query, key, value


def beside_gelu(x: Tensor, y: Tensor) -> Tensor:
    """See :attr:`giornata.packed.elementwise.ElementwiseOps.beside_gelu`."""
    tokens, channels = len(x), x.shape[1] + y.shape[1]
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(channels))
    _gelu_beside[(tokens, triton.cdiv(channels, block))](
        x, y, out, x.stride(0), y.stride(0), X_CHANNELS=x.shape[1], CHANNELS=channels, BLOCK=block
    )
    return out


def launch(device: torch.device) -> None:
    """Run a kernel on `device`; raises what Triton raises where it cannot."""
    one = torch.ones(1, 1, device=device)
    gated(one, one, one, Segments((1,), device))


def _launch(
    stream: QKVProjection,
    positions: Tensor | None,
    rotary: Rotary,
    out: tuple[Tensor, Tensor, Tensor],
    *,
    query: bool,
    value: bool,
) -> None:
    tokens, heads, width = stream.key.shape
    cosine, sine = rotary
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(width)
    _rotate[(tokens,)](
        stream.query, stream.key, stream.value, stream.query_norm.weight, stream.key_norm.weight,
        stream.key if positions is None else positions, cosine, sine, *out,
        stream.query.stride(0), stream.key.stride(0), stream.value.stride(0),
        stream.query_norm.eps, stream.key_norm.eps,
        HAS_QUERY=query, HAS_VALUE=value, MOVES=positions is not None,
        HEADS=heads, WIDTH=width, HEAD_BLOCK=blocks[0], WIDTH_BLOCK=blocks[1],
        num_warps=_warps(blocks[0] * blocks[1]),
    )  # fmt: skip


def _warps(elements: int) -> int:
    """Warps of a program: 16 elements a thread at most, where that many are."""
    return min(8, max(1, elements // 512))


TRITON = ElementwiseOps(modulated, gated, rotated, attended, beside_gelu, gather)
"""Triton's kernels, for float32 and half precision on a CUDA device."""
