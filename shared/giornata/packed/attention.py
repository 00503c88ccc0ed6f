"""Variable-length attention: every sequence attends to its own keys, and sequences differ in length.

A sequence's keys are those of its own tokens and, where part of its picture is not computed, those from outside,
which lie apart. Two implementations with one signature, chosen by :func:`choose`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from giornata.packed.packing import Segments

_kept_segments = lru_cache(maxsize=256)(Segments)
"""Segments on the device, one per mixture of lengths."""


@dataclass(frozen=True, eq=False)
class Outside:
    """Keys and values of tokens that one sequence attends to and does not compute.

    Where they are kept for long, room is left in front of them for the sequence's own, so that no step moves them.
    """

    key: Tensor
    """(room + outside_tokens, heads, head_dim), rotated."""
    value: Tensor
    """As `key`."""
    room: int = 0
    """Leading rows that are overwritten with the sequence's own keys: as many as it has, or none."""


Attention = Callable[[Tensor, Tensor, Tensor, Segments, Mapping[int, Outside]], Tensor]
"""softmax(q k^T / sqrt(head_dim)) v within each sequence: query, key, value, their segments, and what lies outside.

Query, key, value and result are (tokens, heads, head_dim), packed by sequence. `Outside` is given by sequence: what it
attends to besides its own tokens.
"""


def choose(device: torch.device, dtype: torch.dtype) -> Attention:
    """The fastest implementation for tensors of `dtype` on `device`."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return grouped
    ampere = (8, 0)  # the first compute capability with FlashAttention 2
    return varlen if torch.cuda.get_device_capability(device) >= ampere else grouped


def varlen(
    query: Tensor, key: Tensor, value: Tensor, own: Segments, outside: Mapping[int, Outside]
) -> Tensor:
    """One FlashAttention kernel over all sequences: half precision on a CUDA device."""
    keys = own
    if outside:
        beyond = [outside.get(sequence) for sequence in range(len(own.lengths))]
        lengths = (
            length + (0 if each is None else len(each.key) - each.room)
            for length, each in zip(own.lengths, beyond, strict=True)
        )
        keys = _kept_segments(tuple(lengths), query.device)
        key = _beside(key, own, [None if each is None else each.key[each.room :] for each in beyond])
        value = _beside(value, own, [None if each is None else each.value[each.room :] for each in beyond])
    attended = varlen_attn(query, key, value, own.offsets, keys.offsets, own.longest, keys.longest)
    if isinstance(attended, tuple):
        raise TypeError("varlen_attn returned auxiliary values that were not asked for")
    return attended


def grouped(
    query: Tensor, key: Tensor, value: Tensor, own: Segments, outside: Mapping[int, Outside]
) -> Tensor:
    """Scaled-dot-product attention: a call for each sequence with keys outside, one for all others of equal length."""
    out = torch.empty_like(query)
    alike = defaultdict(list)
    for sequence, (start, end) in enumerate(own.bounds):
        beyond = outside.get(sequence)
        if beyond is None:
            alike[end - start].append((start, end))
            continue
        keys, values = _extended(key[start:end], value[start:end], beyond)
        out[start:end] = _attend(query[start:end, None], keys[:, None], values[:, None])[:, 0]
    for spans in alike.values():
        attended = _attend(*(_stacked(packed, spans) for packed in (query, key, value)))
        for index, (start, end) in enumerate(spans):
            out[start:end] = attended[:, index]
    return out


def _beside(packed: Tensor, own: Segments, outside: Sequence[Tensor | None]) -> Tensor:
    """Each sequence's own tokens, then those outside: one copy of all, (tokens, heads, head_dim).

    Sequences may share what lies outside, so that it cannot be written into.
    """
    pairs = zip(torch.split(packed, list(own.lengths)), outside, strict=True)
    return torch.cat([part for pair in pairs for part in pair if part is not None])


def _extended(key: Tensor, value: Tensor, outside: Outside) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, its own (tokens, heads, head_dim) before those outside."""
    if not outside.room:
        return torch.cat((key, outside.key)), torch.cat((value, outside.value))
    outside.key[: outside.room] = key
    outside.value[: outside.room] = value
    return outside.key, outside.value


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of sequences of one shape, (length, sequences, heads, head_dim) each."""
    query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).permute(2, 0, 1, 3)


def _stacked(packed: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """(tokens, heads, head_dim) → (length, sequences, heads, head_dim); a view of one sequence."""
    parts = [packed[start:end] for start, end in spans]
    return parts[0].unsqueeze(1) if len(parts) == 1 else torch.stack(parts, dim=1)
