"""Variable-length attention: every sequence attends to its own keys, and sequences differ in length.

Two implementations with one signature, chosen by :func:`choose`. Queries and keys have segments of their own:
a sequence may have more keys than queries.
"""

from __future__ import annotations

from collections import defaultdict
from importlib.util import find_spec
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata_denoiser.packing import Segments

HAS_VARLEN = find_spec("torch.nn.attention.varlen") is not None
"""Since torch 2.10."""

AMPERE = (8, 0)
"""First compute capability with FlashAttention 2."""


class Attention(Protocol):
    """softmax(q k^T / sqrt(head_dim)) v within each sequence."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments
    ) -> Tensor:
        """Attend.

        Args:
            query: (query_tokens, heads, head_dim), packed by sequence.
            key: (key_tokens, heads, head_dim), packed by sequence.
            value: as `key`.
            queries: segments of `query`.
            keys: segments of `key`; as many as `queries`.

        Returns:
            (query_tokens, heads, head_dim), packed as `query`.
        """


def choose(device: torch.device, dtype: torch.dtype) -> Attention:
    """The fastest implementation for tensors of `dtype` on `device`."""
    if not HAS_VARLEN or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return grouped
    return varlen if torch.cuda.get_device_capability(device) >= AMPERE else grouped


def varlen(query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments) -> Tensor:
    """One FlashAttention kernel over all sequences: half precision on a CUDA device."""
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - see HAS_VARLEN

    attended = varlen_attn(query, key, value, queries.offsets, keys.offsets, queries.longest, keys.longest)
    if isinstance(attended, tuple):
        raise TypeError("varlen_attn returned auxiliary values that were not asked for")
    return attended


def grouped(query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments) -> Tensor:
    """Scaled-dot-product attention, one batched call for all sequences of equal lengths."""
    spans = defaultdict(list)
    for query_span, key_span in zip(queries.bounds, keys.bounds, strict=True):
        lengths = (query_span[1] - query_span[0], key_span[1] - key_span[0])
        spans[lengths].append((query_span, key_span))
    out = torch.empty_like(query)
    for members in spans.values():
        query_spans, key_spans = zip(*members, strict=True)
        attended = F.scaled_dot_product_attention(
            _batched(query, query_spans), _batched(key, key_spans), _batched(value, key_spans)
        )
        for (start, end), part in zip(query_spans, attended, strict=True):
            out[start:end] = part.transpose(0, 1)
    return out


def _batched(packed: Tensor, spans: tuple[tuple[int, int], ...]) -> Tensor:
    """(tokens, heads, head_dim) → (sequences, heads, length, head_dim); a view of one sequence."""
    parts = [packed[start:end] for start, end in spans]
    stacked = parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)
    return stacked.transpose(1, 2)
