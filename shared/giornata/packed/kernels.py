"""Triton kernels of the elementwise functions and of pages of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from giornata.packed.attention import (
    ElementwiseOps,
    HeadNorm,
    PageDestination,
    ProjectedKV,
    QKVProjection,
    QuantisedTensor,
)
from giornata.packed.packing import Layout, Rotary, Segments, to_device

# The Triton kernel of `giornata.packed.attention`: all sequences of a batch in one launch.
#
# A table tells it of every sequence where its tensors lie and how many bits they have. The table is made
# once for as long as they stay the same.


FIELDS: Final = 11
"""Fields of a table's row: first row to write, rows, index; then data, scale, low and bits of what is stored,
and of what is added to it. A row is of the key, the next one of the value of a sequence."""
ADDRESSES: Final = (3, 4, 5, 7, 8, 9)
"""Those of them that are addresses of values."""
ALIGNMENT: Final = 16
NOTHING: Final = -1
"""The bits of what is not added."""


@triton.jit
def _values(
    data, scale, low, bits, row, channel, inside, like, CHANNELS: tl.constexpr, ALIGNED: tl.constexpr
):
    """The channels of one stored row in float32; `like` is a pointer of the dtype of what is not quantised."""
    found = tl.zeros_like(channel).to(tl.float32)
    if bits == 0:
        exact = tl.multiple_of(data.to(like.dtype, bitcast=True), ALIGNED)
        found = tl.load(exact + row * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    if bits > 0:
        bytes_of = tl.multiple_of(data.to(tl.pointer_type(tl.uint8), bitcast=True), ALIGNED)
        half = CHANNELS // 2
        if bits == 8:
            level = tl.load(bytes_of + row * CHANNELS + channel, mask=inside, other=0).to(tl.float32)
        else:
            second = channel >= half
            packed = tl.load(
                bytes_of + row * half + tl.where(second, channel - half, channel), mask=inside, other=0
            )
            level = tl.where(second, packed >> 4, packed & 15).to(tl.float32)
        factor = tl.multiple_of(scale.to(tl.pointer_type(tl.float32), bitcast=True), ALIGNED)
        least = tl.multiple_of(low.to(tl.pointer_type(tl.float32), bitcast=True), ALIGNED)
        found = tl.load(least + channel, mask=inside, other=0.0) + level * tl.load(
            factor + channel, mask=inside, other=0.0
        )
    return found


@triton.jit
def _copy(rows, places, out, token, stride, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.arange(0, BLOCK)
    inside = channel < CHANNELS
    found = tl.load(rows + token * stride + channel, mask=inside, other=0.0)
    tl.store(out + tl.load(places + token) * CHANNELS + channel, found, mask=inside)


@triton.jit
def _write(
    entry, part, key, value, token, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):
    if token < tl.load(entry + 1):
        channel = tl.arange(0, BLOCK)
        inside = channel < CHANNELS
        index = tl.load(entry + 2).to(tl.pointer_type(tl.int64), bitcast=True)
        found = _values(
            tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5), tl.load(entry + 6),
            tl.load(index + token), channel, inside, key, CHANNELS, ALIGNED,
        )  # fmt: skip
        found += _values(
            tl.load(entry + 7), tl.load(entry + 8), tl.load(entry + 9), tl.load(entry + 10),
            token, channel, inside, key, CHANNELS, ALIGNED,
        )  # fmt: skip
        place = (tl.load(entry) + token) * CHANNELS + channel
        if part % 2 == 0:
            tl.store(key + place, found.to(key.dtype.element_ty), mask=inside)
        else:
            tl.store(value + place, found.to(value.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stored", "own"], do_not_specialize_on_alignment=["places"])
def _gather(
    table,
    own_key,
    own_value,
    places,
    key,
    value,
    stored,
    own,
    key_stride,
    value_stride,
    FIELDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Parts are the `stored` rows of the table, then the `own` tokens' keys, then their values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    if part < stored:
        _write(table + part * FIELDS, part, key, value, token, CHANNELS, BLOCK, ALIGNED)
    elif token < own:
        if part == stored:
            _copy(own_key, places, key, token, key_stride, CHANNELS, BLOCK)
        else:
            _copy(own_value, places, value, token, value_stride, CHANNELS, BLOCK)


def gather(placed: Sequence[PageDestination], own: ProjectedKV, key: Tensor, value: Tensor) -> None:
    """See :data:`giornata.packed.attention.Gather`; what is stored as computed has the dtype of `key`."""
    channels = key[0].numel()
    rows = []
    for pages, start in placed:
        for levels, delta in ((pages.key, pages.key_delta), (pages.value, pages.value_delta)):
            rows.append((start, len(pages), pages.index.data_ptr(), *_fields(levels), *_fields(delta)))
    table, aligned = _table(tuple(rows), key.device)
    block, tokens = triton.next_power_of_2(channels), len(own.places)
    _gather[(max(tokens, *(len(pages) for pages, _ in placed)), len(rows) + 2)](
        table, own.key, own.value, own.places, key, value,
        len(rows), tokens, own.key.stride(0), own.value.stride(0),
        FIELDS=FIELDS, CHANNELS=channels, BLOCK=block, ALIGNED=aligned,
        num_warps=min(32, max(1, block // 512)),
    )  # fmt: skip


def _fields(levels: QuantisedTensor | None) -> tuple[int, int, int, int]:
    if levels is None:
        return 0, 0, 0, NOTHING
    scale, low = (0 if part is None else part.data_ptr() for part in (levels.scale, levels.low))
    return levels.data.data_ptr(), scale, low, levels.bits


@lru_cache(maxsize=1024)
def _table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[Tensor, int]:
    """(2 * sequences, FIELDS) int64 on `device`, and the bytes that all addresses of values are multiples of.

    Where these are 16, a thread reads 16 bytes at once.
    """
    addresses = (row[field] for row in rows for field in ADDRESSES)
    aligned = ALIGNMENT if all(address % ALIGNMENT == 0 for address in addresses) else 1
    return to_device(torch.tensor(rows, dtype=torch.int64), device), aligned


# The functions of `giornata.packed.attention` as Triton kernels: a token a program, each tensor read
# once.
#
# Triton's interpreter (`TRITON_INTERPRET=1`, set before the import) runs them on a CPU.


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
    """See :attr:`giornata.packed.attention.ElementwiseOps.modulated`."""
    shift, scale = vectors
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    one = len(shift) == 1
    block = triton.next_power_of_2(channels)
    _modulate[(tokens,)](
        x, shift, scale, x if one else segments.sequence, out,
        x.stride(0), shift.stride(0), scale.stride(0), eps,
        ONE=one, CHANNELS=channels, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


def gated(x: Tensor, values: Tensor, gate: Tensor, segments: Segments) -> Tensor:
    """See :attr:`giornata.packed.attention.ElementwiseOps.gated`."""
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    one = len(gate) == 1
    block = triton.next_power_of_2(channels)
    _gate[(tokens,)](
        x, values, gate, x if one else segments.sequence, out,
        x.stride(0), values.stride(0), gate.stride(0),
        ONE=one, CHANNELS=channels, BLOCK=block, num_warps=warps(block),
    )  # fmt: skip
    return out


def rotated(heads: Tensor, norm: HeadNorm, rotary: Rotary) -> Tensor:
    """See :attr:`giornata.packed.attention.ElementwiseOps.rotated`."""
    out = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    alone = QKVProjection(heads, heads, heads, norm, norm)
    _launch(alone, None, rotary, (out, out, out), query=False, value=False)
    return out


def attended(
    streams: Sequence[QKVProjection], layout: Layout, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """See :attr:`giornata.packed.attention.ElementwiseOps.attended`."""
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
    """See :attr:`giornata.packed.attention.ElementwiseOps.beside_gelu`."""
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
        num_warps=warps(blocks[0] * blocks[1]),
    )  # fmt: skip


def warps(elements: int) -> int:
    """Warps of a program: 16 elements a thread at most, where that many are."""
    return min(8, max(1, elements // 512))


TRITON = ElementwiseOps(modulated, gated, rotated, attended, beside_gelu, gather)
"""Triton's kernels, for float32 and half precision on a CUDA device."""
