"""What a step is made of equals plain sums in float64: at FLUX.1-dev's shape on a GPU, at a tiny one on a CPU.

Kernels choose their tiles by sizes, so that small shapes try other code. Bounds are roundings of each result's terms,
in the dtype of the tensors; what the wrong token, head or row makes is as large as the values themselves.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import pytest
import torch
from torch import Tensor

from giornata.packed import attention, low_rank
from giornata.packed.attention import (
    ElementwiseOps,
    HeadNorm,
    KVPages,
    QKVProjection,
    QuantisedTensor,
    beside,
    choose_attention,
)
from giornata.packed.low_rank import FactorSpan, LowRankFactors
from giornata.packed.packing import Segments, make_layout
from giornata_denoiser.rows.template import store


class Shape(NamedTuple):
    """Of a transformer, and of the rows that it computes."""

    heads: int
    width: int
    picture: int
    """Tokens."""
    text: int
    computed: int
    """Tokens of the picture that a mask leaves to be computed."""

    @property
    def channels(self) -> int:
        return self.heads * self.width


FLUX: Final = Shape(heads=24, width=128, picture=4096, text=512, computed=700)
TINY: Final = Shape(heads=2, width=16, picture=64, text=9, computed=12)
PEAKED: Final = 3.0
"""Times as large as usual are queries: some keys then have most of the weight, and one that is wrong shows."""
ROUNDINGS: Final = 4.0
ATTENTION: Final = {torch.float32: (1e-3, 1e-4), torch.bfloat16: (1e-2, 1e-2)}
"""Absolute and relative."""
DTYPES: Final = pytest.mark.parametrize("dtype", ATTENTION)


class Draw:
    """Normal numbers for one test, drawn on its device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._generator, self.device, self.dtype = torch.Generator(device).manual_seed(0), device, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(*shape, generator=self._generator, device=self.device)
        return drawn.to(dtype or self.dtype)

    def order(self, count: int) -> Tensor:
        """(count,) int64: so many numbers from 0 on, in any order."""
        return torch.randperm(count, generator=self._generator, device=self.device)

    def stored(self, tokens: int, channels: int, bits: int, aside: int = 0) -> tuple[QuantisedTensor, Tensor]:
        """Tokens in so many bits, `aside` bytes beyond a multiple of 16; and their values in float64."""
        kept = store(self(tokens, channels), bits)
        if kept.scale is None or kept.low is None:
            return QuantisedTensor(*kept.tensors), kept.data.double()
        data = torch.cat((kept.data.new_zeros(aside), kept.data.flatten()))[aside:].view_as(kept.data)
        levels = data if bits == 8 else torch.cat((data & 15, data >> 4), dim=1)
        return QuantisedTensor(
            data, kept.scale, kept.low
        ), levels.double() * kept.scale.double() + kept.low.double()


@pytest.fixture
def shape(device: torch.device) -> Shape:
    return FLUX if device.type == "cuda" else TINY


def fastest(device: torch.device, dtype: torch.dtype) -> ElementwiseOps:
    return attention.choose_elementwise(device, dtype)


def assert_near(found: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """Equal but for a few roundings in the dtype of `found` of the sum of `terms`, which are absolute values."""
    bound = ROUNDINGS * torch.finfo(found.dtype).eps * terms
    beyond = ((found.double() - wanted).abs() - bound).max()
    assert float(beyond) <= 0, f"{float(beyond):.2e} beyond the bound"


def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one sequence in float64, a head at a time: the scores of all take gigabytes."""
    parts = [
        (query[:, head].double() @ key[:, head].double().t() / query.shape[2] ** 0.5).softmax(-1)
        @ value[:, head].double()
        for head in range(query.shape[1])
    ]
    return torch.stack(parts, dim=1)


@DTYPES
def test_rows_in_full_attend_to_themselves(device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
    draw, tokens = Draw(device, dtype), shape.text + shape.picture
    query, key, value = (draw(2 * tokens, shape.heads, shape.width) for _ in range(3))
    query *= PEAKED
    attend = choose_attention(device, dtype, fastest(device, dtype).gather)
    found = attend(query, key, value, Segments((tokens, tokens), device), {})
    absolute, relative = ATTENTION[dtype]
    for part in (slice(0, tokens), slice(tokens, None)):
        wanted = plain(query[part], key[part], value[part])
        torch.testing.assert_close(found[part].double(), wanted, atol=absolute, rtol=relative)


@DTYPES
@pytest.mark.parametrize("aside", [0, 1], ids=["aligned", "not aligned"])
def test_masked_rows_attend_to_what_is_gathered_beside_one_in_full(
    device: torch.device, dtype: torch.dtype, shape: Shape, aside: int
) -> None:
    """Rows with 8 bits and corrections, 4 bits, none; and one without a mask."""
    draw, masked = Draw(device, dtype), shape.text + shape.computed
    own = Segments((masked, masked, masked, shape.text + shape.picture), device)
    query, key, value = (draw(own.bounds[-1][1], shape.heads, shape.width) for _ in range(3))
    query *= PEAKED
    outside: dict[int, KVPages] = {}
    beyond: dict[int, list[Tensor]] = {}
    for row, (bits, corrected) in enumerate(((8, True), (4, False), (0, False))):
        index = draw.order(shape.picture)[shape.computed :]
        kept = [draw.stored(shape.picture, shape.channels, bits, aside) for _ in range(2)]
        added = [draw.stored(len(index), shape.channels, 8, aside) for _ in range(2)]
        deltas = [levels if corrected else None for levels, _ in added]
        outside[row] = KVPages(index, kept[0][0], kept[1][0], *deltas)
        beyond[row] = [
            (values[index] + corrected * more).view(-1, shape.heads, shape.width)
            for (_, values), (_, more) in zip(kept, added, strict=True)
        ]
    gather = fastest(device, dtype).gather
    keys, values, spans = beside(key, value, own, outside, gather)
    attended = choose_attention(device, dtype, gather)(query, key, value, own, outside)
    absolute, relative = ATTENTION[dtype]
    for row, ((start, end), (first, last)) in enumerate(zip(own.bounds, spans.bounds, strict=True)):
        wanted = [
            torch.cat((mine[start:end].double(), *more))
            for mine, more in zip((key, value), zip(beyond[row]) if row in beyond else ((), ()), strict=True)
        ]
        for found, of in zip((keys, values), wanted, strict=True):
            assert_near(found[first:last], of, of.abs() + 1)
        rounded = [of.to(dtype) for of in wanted]  # as the attention is given them
        told = plain(query[start:end], *rounded)
        torch.testing.assert_close(attended[start:end].double(), told, atol=absolute, rtol=relative)


@DTYPES
def test_modulation_and_gates_of_two_rows(device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
    draw, lengths = Draw(device, dtype), (shape.picture, shape.text + shape.computed)
    segments, kernels = Segments(lengths, device), fastest(device, dtype)
    x, values = (draw(sum(lengths), shape.channels) for _ in range(2))
    shift, scale, gate = draw(len(lengths), 3 * shape.channels).chunk(3, dim=1)
    modulated = kernels.modulated(x, (shift, scale), segments, 1e-6)
    gated = kernels.gated(x, values, gate, segments)
    for row, (start, end) in enumerate(segments.bounds):
        own = x[start:end].double()
        centred = own - own.mean(1, keepdim=True)
        normed = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
        product, added = normed * (1 + scale[row].double()), shift[row].double()
        assert_near(modulated[start:end], product + added, product.abs() + added.abs() + 1)
        through = gate[row].double() * values[start:end].double()
        assert_near(gated[start:end], own + through, own.abs() + through.abs())


def turned(x: Tensor, norm: HeadNorm, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """RMS norm and rotary embedding of (tokens, heads, head_dim) in float64, and the absolute values of its terms."""
    normed = x.double() / (x.double().square().mean(2, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    pairs = normed.view(*normed.shape[:2], -1, 2)
    across = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=3).flatten(2)
    terms = normed * cosine.double()[:, None], across * sine.double()[:, None]
    return terms[0] + terms[1], terms[0].abs() + terms[1].abs()


@DTYPES
@pytest.mark.parametrize("streams", [1, 2])
def test_heads_are_normed_turned_and_joined(
    device: torch.device, dtype: torch.dtype, shape: Shape, streams: int
) -> None:
    """Text and image of a block of two streams, or the joint order of one."""
    draw = Draw(device, dtype)
    text, image = (shape.text, shape.text // 2), (shape.picture, shape.computed)
    places, tokens = make_layout(text, image, device), sum(text) + sum(image)
    pairs = draw(2, tokens, shape.width // 2, dtype=torch.float32)
    cosine, sine = pairs.repeat_interleave(2, dim=2).unbind()

    def projected(count: int) -> QKVProjection:
        packed = draw(count, 3 * shape.channels).view(count, 3, shape.heads, shape.width)
        query, key, value = packed.unbind(1)
        norms = [HeadNorm(draw(shape.width), 1e-6) for _ in range(2)]
        return QKVProjection(query, key, value, norms[0], norms[1])

    made = [projected(count) for count in ((sum(text), sum(image)) if streams == 2 else (tokens,))]
    query, key, value = fastest(device, dtype).attended(made, places, (cosine, sine))
    begun, at = [0] * streams, 0
    for spans in zip(text, image, strict=True):
        for stream, count in enumerate(spans) if streams == 2 else ((0, sum(spans)),):
            own, joint = slice(begun[stream], begun[stream] + count), slice(at, at + count)
            of, angles = made[stream], (cosine[joint], sine[joint])
            assert_near(query[joint], *turned(of.query[own], of.query_norm, *angles))
            assert_near(key[joint], *turned(of.key[own], of.key_norm, *angles))
            assert torch.equal(value[joint], of.value[own])
            begun[stream] += count
            at += count


@DTYPES
def test_gelu_beside_the_attention(device: torch.device, dtype: torch.dtype, shape: Shape) -> None:
    tokens, hidden = shape.text + shape.picture, 4 * shape.channels
    packed = Draw(device, dtype)(tokens, shape.channels + hidden)
    x, y = packed[:, : shape.channels], packed[:, shape.channels :]
    found = fastest(device, dtype).beside_gelu(x, y)
    assert torch.equal(found[:, : shape.channels], x)
    wanted = torch.nn.functional.gelu(y.double(), approximate="tanh")
    single = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    assert_near(found[:, shape.channels :], wanted, wanted.abs() + single * y.abs().double())


@DTYPES
def test_low_rank_products_of_rows_with_other_loras_or_none(
    device: torch.device, dtype: torch.dtype, shape: Shape
) -> None:
    """Of the projection to query, key and value; ranks 16 and 64."""
    draw, ranks = Draw(device, dtype), (16, 0, 64)
    lengths = (shape.text + shape.picture, shape.text + shape.computed, 7)
    segments, outputs = Segments(lengths, device), 3 * shape.channels
    entering, leaving = draw(sum(lengths), shape.channels), draw(sum(lengths), outputs)
    before, parts = leaving.double(), []
    for (start, end), rank in zip(segments.bounds, ranks, strict=True):
        if rank:
            down, up = (
                draw(rank, shape.channels) / shape.channels**0.5,
                draw(outputs, rank) / rank**0.5,
            )
            parts.append(FactorSpan(LowRankFactors(down, up), start, end))
    low_rank.add_products(entering, leaving, parts)
    acted = {part.start: part for part in parts}
    sums = torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    for start, end in segments.bounds:
        own = before[start:end]
        if start not in acted:
            assert torch.equal(leaving[start:end].double(), own)
            continue
        down, up = (factor.double() for factor in acted[start].factors)
        x = entering[start:end].double()
        low = x @ down.t()
        terms = own.abs() + (low.abs() + sums * (x.abs() @ down.t().abs())) @ up.t().abs()
        assert_near(leaving[start:end], own + low @ up.t(), terms)
