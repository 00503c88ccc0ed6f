"""The Triton kernel of :mod:`giornata.packed.pages`: all sequences of a batch in one launch.

A table tells it of every sequence where its tensors lie and how many bits they have. The table is made once for as long
as they stay the same.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from giornata.packed.moving import moved
from giornata.packed.pages import PageDestination, ProjectedKV, QuantisedTensor

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
    """See :data:`giornata.packed.pages.Gather`; what is stored as computed has the dtype of `key`."""
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
    return moved(torch.tensor(rows, dtype=torch.int64), device), aligned
