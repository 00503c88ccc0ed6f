"""The work of blocks between products: attention of any lengths, elementwise functions, and what later steps take."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor

from giornata.packed.packing import Layout, Rotary, Segments, to_device

# Keys and values of outside tokens as they are stored. Nothing of them is kept in the network's dtype: where a block
# attends, one kernel gathers the tokens of all sequences, dequantises them, adds their corrections and writes them
# behind the sequences' own.


class QuantisedTensor(NamedTuple):
    """(tokens, channels) as stored: value = low + level * scale, or as computed where there is no scale."""

    data: Tensor
    """(tokens, channels), or uint8 in 8 bits; in 4 bits (tokens, channels / 2) uint8: the first half of the channels in
    the low nibbles, the second half in the high ones."""
    scale: Tensor | None = None
    """(channels,) float32."""
    low: Tensor | None = None
    """As `scale`."""

    @property
    def bits(self) -> int:
        """0 as computed, else 8 or 4."""
        if self.scale is None:
            return 0
        return 8 if len(self.scale) == self.data.shape[1] else 4

    def rows(self, index: Tensor | None = None) -> Tensor:
        """The tokens `index`, (n,) int64, or all: (n, channels), float32 where they are quantised."""
        data = self.data if index is None else self.data.index_select(0, index)
        if self.scale is None or self.low is None:
            return data
        levels = data if self.bits == 8 else torch.cat((data & 15, data >> 4), dim=1)
        return torch.addcmul(self.low, levels.float(), self.scale)


@dataclass(frozen=True, eq=False)
class KVPages:
    """Keys and values that one sequence attends to besides its own, on the device, still as they are stored."""

    index: Tensor
    """(outside,) int64: their rows in `key` and `value`."""
    key: QuantisedTensor
    """(tokens, heads * head_dim), rotated."""
    value: QuantisedTensor
    key_delta: QuantisedTensor | None = None
    """(outside, heads * head_dim): what is added to the key; None adds nothing."""
    value_delta: QuantisedTensor | None = None

    def __len__(self) -> int:
        return len(self.index)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Key and value, corrected: (outside, heads * head_dim) each, float32 where they are quantised or corrected."""
        parts = ((self.key, self.key_delta), (self.value, self.value_delta))
        key, value = (
            levels.rows(self.index) if delta is None else levels.rows(self.index).float() + delta.rows()
            for levels, delta in parts
        )
        return key, value


class PageDestination(NamedTuple):
    """The destination of pages."""

    pages: KVPages
    start: int
    """The first of their rows in the keys and values that are written."""


class ProjectedKV(NamedTuple):
    """The keys and values that the sequences have projected themselves."""

    key: Tensor
    """(own_tokens, heads, head_dim), rows of any stride."""
    value: Tensor
    """As `key`."""
    places: Tensor
    """(own_tokens,) int64: the rows that they are written to."""


Gather = Callable[[Sequence[PageDestination], ProjectedKV, Tensor, Tensor], None]
"""Writes pages, and what is the sequences' own, into key and value, (tokens, heads, head_dim) each, contiguous."""


def gather(placed: Sequence[PageDestination], own: ProjectedKV, key: Tensor, value: Tensor) -> None:
    """See :data:`Gather`; by torch's operations, on any device."""
    key.index_copy_(0, own.places, own.key)
    value.index_copy_(0, own.places, own.value)
    for pages, start in placed:
        for out, rows in zip((key, value), pages.rows(), strict=True):
            out[start : start + len(pages)] = rows.view(-1, *out.shape[1:])


# Variable-length attention: every sequence attends to its own keys, and sequences differ in length.
#
# A sequence's keys are those of its own tokens and, where part of its picture is not computed, those from
# outside, which lie apart. Two implementations with one signature, chosen by `choose`.


@dataclass(frozen=True, eq=False)
class DenseKV:
    """Keys and values of tokens that one sequence attends to and does not compute.

    Where they are kept for long, room is left in front of them for the sequence's own, so that no step moves them.
    """

    key: Tensor
    """(room + outside_tokens, heads, head_dim), rotated."""
    value: Tensor
    """As `key`."""
    room: int = 0
    """Leading rows that are overwritten with the sequence's own keys, and with others that it attends to: as many as
    these are, or none."""


Apart = DenseKV | KVPages
"""Keys and values of tokens that a sequence attends to and does not compute."""
Beside = Apart | tuple[Apart, ...]
"""All of these of one sequence. At most one of several has room: for the sequence's own and all others."""
Attention = Callable[[Tensor, Tensor, Tensor, Segments, Mapping[int, Beside]], Tensor]
"""softmax(q k^T / sqrt(head_dim)) v within each sequence: query, key, value, their segments, and what lies outside.

Query, key, value and result are (tokens, heads, head_dim), packed by sequence. `Beside` is given by sequence: what it
attends to besides its own tokens.
"""


Crossing = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor], Segments], Tensor]
"""Attention of packed queries, (tokens, heads, head_dim), over other keys and values: (keys, heads, head_dim) of each
sequence. The segments are those of the queries; the result is packed as they are."""


def choose_attention(device: torch.device, dtype: torch.dtype, gather: Gather) -> partial[Tensor]:
    """The fastest implementation for tensors of `dtype` on `device`; `gather` writes pages there."""
    return partial(varlen if _has_varlen(device, dtype) else grouped, gather=gather)


def choose_cross_attention(device: torch.device, dtype: torch.dtype) -> Crossing:
    """The same for attention over other keys."""
    return varlen_across if _has_varlen(device, dtype) else each_across


def _has_varlen(device: torch.device, dtype: torch.dtype) -> bool:
    ampere = (8, 0)  # the first compute capability with FlashAttention 2
    half = device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
    if not half or torch.cuda.get_device_capability(device) < ampere:
        return False
    import_module("torch.nn.attention.varlen")  # with the network: no step waits for it
    return True


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Segments,
    outside: Mapping[int, Beside],
    *,
    gather: Gather = gather,
) -> Tensor:
    """One kernel over all sequences, in half precision on a CUDA device.

    Sequences of one length that attend to themselves alone are a batch, for which torch has a kernel that is 1.75 times
    as fast (H100, 8 rows of Flux: 622 beside 355 TFLOP/s).
    """
    if own.even and not outside:
        return grouped(query, key, value, own, outside)
    keys = own
    if outside:
        key, value, keys = beside(key, value, own, outside, gather)
    return _varlen(query, key, value, own, keys)


def varlen_across(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], queries: Segments
) -> Tensor:
    """See :data:`Crossing`; one FlashAttention kernel over all sequences."""
    lengths = _segments(tuple(map(len, keys)), query.device)
    return _varlen(query, torch.cat(list(keys)), torch.cat(list(values)), queries, lengths)


@lru_cache(maxsize=256)
def _segments(lengths: tuple[int, ...], device: torch.device) -> Segments:
    """Their offsets are copied to the device once, not in every block."""
    return Segments(lengths, device)


def each_across(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], queries: Segments) -> Tensor:
    """See :data:`Crossing`; a scaled-dot-product attention for each sequence."""
    heads, parts = query.transpose(0, 1), []
    for (start, end), key, value in zip(queries.bounds, keys, values, strict=True):
        by_head = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(heads[None, :, start:end], *by_head)
        parts.append(attended[0].transpose(0, 1))
    return torch.cat(parts)


def _varlen(query: Tensor, key: Tensor, value: Tensor, queries: Segments, keys: Segments) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - loads torch._dynamo, which no CPU needs

    attended = varlen_attn(query, key, value, queries.offsets, keys.offsets, queries.longest, keys.longest)
    if isinstance(attended, tuple):
        raise TypeError("varlen_attn returned auxiliary values that were not asked for")
    return attended


def grouped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Segments,
    outside: Mapping[int, Beside],
    *,
    gather: Gather = gather,
) -> Tensor:
    """Scaled-dot-product attention: a call for each sequence with keys outside, one for all others of equal length."""
    if own.even and not outside:
        shape = *own.items, *query.shape[1:]
        attended = _attend(query.view(shape), key.view(shape), value.view(shape))
        return attended.reshape(query.shape)
    out, heads = torch.empty_like(query), query.transpose(0, 1)
    alike = defaultdict(list)
    for sequence, (start, end) in enumerate(own.bounds):
        beyond = outside.get(sequence)
        if beyond is None:
            alike[end - start].append((start, end))
            continue
        if isinstance(beyond, DenseKV) and beyond.room:
            keys, values = beyond.key, beyond.value
            keys[: beyond.room], values[: beyond.room] = key[start:end], value[start:end]
        else:
            keys, values = _extended(key[start:end], value[start:end], beyond, gather)
        by_head = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        attended = F.scaled_dot_product_attention(heads[None, :, start:end], *by_head)
        out[start:end] = attended[0].transpose(0, 1)
    for spans in alike.values():
        attended = _attend(_stacked(query, spans), _stacked(key, spans), _stacked(value, spans))
        for part, (start, end) in zip(attended, spans, strict=True):
            out[start:end] = part
    return out


def beside(
    key: Tensor, value: Tensor, own: Segments, outside: Mapping[int, Beside], gather: Gather
) -> tuple[Tensor, Tensor, Segments]:
    """Keys and values with each sequence's own before those outside, (tokens, heads, head_dim) each; their segments.

    They are in memory of their own: sequences of one kernel may share what lies outside.
    """
    parts = {s: _parts(each) for s, each in outside.items()}
    lengths = tuple(sorted((s, sum(map(outside_tokens, of))) for s, of in parts.items()))
    places = _places(own.lengths, lengths, key.device)
    segments = places.segments
    if not any(isinstance(each, KVPages) for of in parts.values() for each in of):
        apart = [
            [each for each in parts.get(s, ()) if isinstance(each, DenseKV)] for s in range(len(own.lengths))
        ]
        keys = [[each.key[each.room :] for each in of] for of in apart]
        values = [[each.value[each.room :] for each in of] for of in apart]
        return _concatenated(key, own, keys), _concatenated(value, own, values), segments
    shape = (segments.bounds[-1][1], *key.shape[1:])
    all_keys, all_values = key.new_empty(shape), value.new_empty(shape)
    stored: list[PageDestination] = []
    for sequence, of in parts.items():
        start = segments.bounds[sequence][0] + own.lengths[sequence]
        for each in of:
            if isinstance(each, KVPages):
                stored.append(PageDestination(each, start))
            else:
                all_keys[start : start + outside_tokens(each)] = each.key[each.room :]
                all_values[start : start + outside_tokens(each)] = each.value[each.room :]
            start += outside_tokens(each)
    gather(stored, ProjectedKV(key, value, places.own), all_keys, all_values)
    return all_keys, all_values, segments


class _KVPlaces(NamedTuple):
    segments: Segments
    """Own and outside tokens of each sequence."""
    own: Tensor
    """(own_tokens,) int64: where each sequence's own lie among them."""


@lru_cache(maxsize=256)
def _places(own: tuple[int, ...], outside: tuple[tuple[int, int], ...], device: torch.device) -> _KVPlaces:
    """Return where tokens lie, for sequences with so many tokens of their own, and so many outside by sequence."""
    beyond = dict(outside)
    segments = Segments(tuple(length + beyond.get(s, 0) for s, length in enumerate(own)), device)
    parts = [
        torch.arange(start, start + length) for (start, _), length in zip(segments.bounds, own, strict=True)
    ]
    return _KVPlaces(segments, to_device(torch.cat(parts), device))


def _parts(outside: Beside) -> tuple[Apart, ...]:
    return outside if isinstance(outside, tuple) else (outside,)


def outside_tokens(outside: Apart) -> int:
    """Tokens that it has, without room."""
    return len(outside) if isinstance(outside, KVPages) else len(outside.key) - outside.room


def _concatenated(packed: Tensor, own: Segments, outside: Sequence[Sequence[Tensor]]) -> Tensor:
    """Each sequence's own tokens, then those outside: one copy of all, (tokens, heads, head_dim)."""
    pairs = zip(torch.split(packed, list(own.lengths)), outside, strict=True)
    return torch.cat([part for mine, others in pairs for part in (mine, *others)])


def _extended(key: Tensor, value: Tensor, outside: Beside, gather: Gather) -> tuple[Tensor, Tensor]:
    """One sequence's keys and values, its own (tokens, heads, head_dim) before those outside."""
    if isinstance(outside, DenseKV) and not outside.room:
        return torch.cat((key, outside.key)), torch.cat((value, outside.value))
    outside = _parts(outside)
    apart = [each for each in outside if isinstance(each, DenseKV)]
    roomy = next((each for each in apart if each.room), None)
    if len(apart) < len(outside) or roomy is None:
        own = Segments((len(key),), key.device)
        return beside(key, value, own, {0: outside}, gather)[:2]
    others = [each for each in apart if each is not roomy]
    torch.cat([key, *(each.key for each in others)], out=roomy.key[: roomy.room])
    torch.cat([value, *(each.value for each in others)], out=roomy.value[: roomy.room])
    return roomy.key, roomy.value


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of sequences of one shape, (sequences, length, heads, head_dim) each."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _stacked(packed: Tensor, spans: list[tuple[int, int]]) -> Tensor:
    """(tokens, heads, head_dim) → (sequences, length, heads, head_dim); a view of one sequence."""
    parts = [packed[start:end] for start, end in spans]
    return parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)


# The work of transformer blocks on every token by itself, between products.
#
# Two implementations with one signature, chosen by `choose_elementwise`: torch's operations, and Triton's kernels
# (`giornata.packed.kernels`), which read and write each tensor once. A sequence's modulation vectors apply to its
# packed tokens, so that one launch serves the whole batch. Sums are in float32, and results are rounded to the dtype
# where diffusers rounds them.


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
    return rotate(F.rms_norm(heads, heads.shape[-1:], norm.weight, norm.eps), turns_of(rotary))


def attended(
    streams: Sequence[QKVProjection], layout: Layout, rotary: Rotary
) -> tuple[Tensor, Tensor, Tensor]:
    """See :attr:`ElementwiseOps.attended`."""
    queries, keys = [], []
    for each in streams:
        width = each.query.shape[-1:]
        queries.append(F.rms_norm(each.query, width, each.query_norm.weight, each.query_norm.eps))
        keys.append(F.rms_norm(each.key, width, each.key_norm.weight, each.key_norm.eps))
    turns = turns_of(rotary)
    if len(streams) == 1:
        return rotate(queries[0], turns), rotate(keys[0], turns), streams[0].value
    text, image = streams
    query, key = layout.join(queries[0], queries[1]), layout.join(keys[0], keys[1])
    return rotate(query, turns), rotate(key, turns), layout.join(text.value, image.value)


def beside_gelu(x: Tensor, y: Tensor) -> Tensor:
    """See :attr:`ElementwiseOps.beside_gelu`."""
    return torch.cat((x, F.gelu(y, approximate="tanh")), dim=1)


def turns_of(rotary: Rotary) -> Tensor:
    """(tokens, 1, head_dim / 2) complex numbers by which pairs of neighbouring channels are multiplied."""
    cosine, sine = rotary
    return torch.complex(cosine[:, ::2], sine[:, ::2]).unsqueeze(1)


def rotate(heads: Tensor, turns: Tensor) -> Tensor:
    """Rotary embedding of (tokens, heads, head_dim) by :func:`turns_of`, in float32.

    As `apply_rotary_emb` of diffusers but for the last bit, and in fewer passes.
    """
    pairs = torch.view_as_complex(heads.float().view(*heads.shape[:-1], heads.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(heads.dtype)


TORCH = ElementwiseOps(modulated, gated, rotated, attended, beside_gelu, gather)
"""torch's operations, on any device."""


# A sequence's own keys and values of tokens that not every step computes: kept from one step, taken by
# later ones.


class CachedKV:
    """The keys and values that one sequence keeps; satisfies :class:`giornata.packed.packing.KVSource`.

    `index`, (kept,) int64 on the device, are the tokens that are kept of those that a recorder shows; None keeps all.
    There is room for the keys and values of `own` tokens in front of those that are kept.
    """

    def __init__(self, index: Tensor | None, own: int) -> None:
        self._index, self._own = index, own
        self._kept: dict[int, Apart] = {}

    @property
    def keeps(self) -> bool:
        """See :attr:`giornata.packed.packing.KVSource.keeps`."""
        return True

    def keys_values(self, block: int) -> Apart:
        """(own + kept, heads, head_dim) each, the first `own` rows free.

        Raises:
            LookupError: no step that keeps has passed the block.
        """
        return self._kept[block]

    def hidden(self, block: int) -> Tensor:
        """Nothing is kept of a block's input.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"the input of block {block} is not kept")

    def part(self, block: int, part: str) -> Tensor:
        """Nothing is kept of other parts.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"{part} of block {block} is not kept")

    def keep(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each, of which it keeps its own."""
        key, value = self._of(key), self._of(value)
        kept = self._kept.get(block)
        if not isinstance(kept, DenseKV):
            shape = self._own + len(key), *key.shape[1:]
            kept = self._kept[block] = DenseKV(key.new_empty(shape), value.new_empty(shape), self._own)
        kept.key[self._own :] = key
        kept.value[self._own :] = value

    def keep_part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels) of another part: nothing is kept."""

    def _of(self, shown: Tensor) -> Tensor:
        """The tokens that are kept of those that are shown."""
        return shown if self._index is None else shown.index_select(0, self._index)


class CachedKVRecorder:
    """Fills what a sequence keeps in a step, whose :class:`giornata.packed.packing.ActivationRecorder` it is."""

    def __init__(self, kept: CachedKV) -> None:
        self._kept = kept

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nothing is kept of a block's input."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each."""
        self._kept.keep(block, key, value)

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels)."""
        self._kept.keep_part(block, part, kept)
