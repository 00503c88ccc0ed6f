"""Triton's kernels against torch's operations, and these against diffusers' own modules."""

from __future__ import annotations

from contextlib import nullcontext
from importlib import import_module
from typing import Any, Final

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormZero
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.attention import TORCH, ElementwiseOps, HeadNorm, QKVProjection, choose_elementwise
from giornata.packed.packing import Segments, make_layout
from tests.examples import examples

DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)
ULPS: Final = 2.0
"""Roundings by which the two may differ: sums are grouped otherwise, and the interpreter cuts bfloat16 off."""


@pytest.fixture(scope="module", name="kernels")
def triton_kernels() -> ElementwiseOps:
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    from giornata.packed.kernels import TRITON  # noqa: PLC0415 - imports Triton

    return TRITON


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_alike(found: Tensor, wanted: Tensor, terms: float = 1.0) -> None:
    """Equal but for a few roundings of results whose terms are `terms` times as large as they are."""
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    scale = max(1.0, float(wanted.abs().max())) * terms
    tolerance = ULPS * torch.finfo(wanted.dtype).eps * scale
    torch.testing.assert_close(found.double(), wanted.double(), atol=tolerance, rtol=0)


def cancelled(x: Tensor, eps: float) -> float:
    """How many times as large as a result of LayerNorm its terms are where a token's channels are nearly equal."""
    x = x.double()
    return max(1.0, float((x.abs().amax(1) / (x.var(1, correction=0) + eps).sqrt()).max()))


CASES = {
    "lengths": st.lists(st.integers(1, 5), min_size=1, max_size=3),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 1000),
}


@examples(times=1 / 4)  # interpreted kernels are slow
@given(**CASES, channels=st.integers(2, 40))
def test_modulation_is_the_twins(
    kernels: ElementwiseOps, lengths: list[int], dtype: torch.dtype, seed: int, channels: int
) -> None:
    segments = Segments(tuple(lengths), DEVICE)
    x = random((sum(lengths), channels), dtype, seed)
    shift, scale, gate = random((len(lengths), 3 * channels), dtype, seed + 1).chunk(3, dim=1)
    values = random((sum(lengths), channels), dtype, seed + 2)
    found, wanted = (each.modulated(x, (shift, scale), segments, 1e-6) for each in (kernels, TORCH))
    assert_alike(found, wanted, terms=4 * cancelled(x, 1e-6))
    found, wanted = (each.gated(x, values, gate, segments) for each in (kernels, TORCH))
    assert_alike(found, wanted)


@examples(times=1 / 4)  # interpreted kernels are slow
@given(**CASES, heads=st.integers(1, 3), pairs=st.integers(1, 9), streams=st.integers(1, 2))
def test_normed_and_rotated_heads_are_the_twins(
    kernels: ElementwiseOps,
    lengths: list[int],
    dtype: torch.dtype,
    seed: int,
    heads: int,
    pairs: int,
    streams: int,
) -> None:
    width, image = 2 * pairs, [length + 1 for length in lengths]
    places = make_layout(lengths, image, DEVICE)
    angles_of = random((2, sum(lengths) + sum(image), pairs), torch.float32, seed)
    rotary = angles_of.repeat_interleave(2, dim=2)
    counts = (sum(lengths), sum(image)) if streams == 2 else (sum(lengths) + sum(image),)

    def projected(tokens: int, number: int) -> QKVProjection:
        packed = random((tokens, 3 * heads * width), dtype, seed + number)
        query, key, value = (part.view(tokens, heads, width) for part in packed.chunk(3, dim=1))
        norms = [HeadNorm(random((width,), dtype, seed + number + i), 1e-6) for i in (5, 6)]
        return QKVProjection(query, key, value, norms[0], norms[1])

    made = [projected(tokens, number) for number, tokens in enumerate(counts)]
    angles = (rotary[0], rotary[1])
    found, wanted = (each.attended(made, places, angles) for each in (kernels, TORCH))
    for own, other in zip(found[:2], wanted[:2], strict=True):
        assert_alike(own, other, terms=4)
    assert torch.equal(found[2], wanted[2])
    heads_alone = (made[0].key, made[0].key_norm, (rotary[0][: counts[0]], rotary[1][: counts[0]]))
    turned, turned_wanted = (each.rotated(*heads_alone) for each in (kernels, TORCH))
    assert_alike(turned, turned_wanted, terms=4)


@examples(times=1 / 3)  # interpreted kernels are slow
@given(tokens=st.integers(1, 4), first=st.integers(1, 20), second=st.integers(1, 1100), dtype=CASES["dtype"])
def test_gelu_beside_the_attention_is_the_twins(
    kernels: ElementwiseOps, tokens: int, first: int, second: int, dtype: torch.dtype
) -> None:
    packed = random((tokens, first + 2 * second), dtype, second)
    x, y = packed[:, :first], packed[:, -second:]
    found, wanted = (each.beside_gelu(x, y) for each in (kernels, TORCH))
    assert_alike(found, wanted)


def test_the_twin_is_diffusers_bit_for_bit_but_for_the_rounding_of_rotations() -> None:
    segments = Segments((3, 4))
    norm: Any = AdaLayerNormZero(24).requires_grad_(requires_grad=False)
    x, conditioning = random((7, 24), torch.float32, 0).cpu(), random((2, 24), torch.float32, 1).cpu()
    # Sequence by sequence: a product of two rows may round otherwise than that of one.
    vectors = torch.cat([norm.linear(norm.silu(of[None])) for of in conditioning])
    shift, scale, gate, *_ = vectors.chunk(6, dim=1)
    modulated = TORCH.modulated(x, (shift, scale), segments, norm.norm.eps)
    gated = TORCH.gated(x, modulated, gate, segments)
    for index, (start, end) in enumerate(segments.bounds):
        wanted, factor, *_ = norm(x[None, start:end], emb=conditioning[index : index + 1])
        assert torch.equal(modulated[start:end], wanted[0])
        assert torch.equal(gated[start:end], x[start:end] + factor * wanted[0])
    heads, weight = random((7, 3, 16), torch.float32, 2).cpu(), random((16,), torch.float32, 3).cpu()
    cosine, sine = random((2, 7, 8), torch.float32, 4).cpu().repeat_interleave(2, dim=2)
    own = torch.nn.RMSNorm(16, eps=1e-6)
    own.weight.data = weight
    wanted = apply_rotary_emb(own(heads)[None], (cosine, sine), sequence_dim=1)[0]
    rotated = TORCH.rotated(heads, HeadNorm(weight, 1e-6), (cosine, sine))
    torch.testing.assert_close(rotated, wanted, rtol=0, atol=1e-6)  # processors differ in whether they fuse


def test_kernels_serve_cuda_and_nothing_else() -> None:
    assert choose_elementwise(torch.device("cpu"), torch.float32) is TORCH
    assert choose_elementwise(torch.device("cuda"), torch.float64) is TORCH


@pytest.mark.parametrize("works", [True, False])
def test_kernels_are_chosen_where_they_can_be_launched(
    kernels: ElementwiseOps, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    module = import_module("giornata.packed.kernels")
    module.launch(torch.device(DEVICE))

    def launch(device: torch.device) -> None:
        if not works:
            raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(module, "launch", launch)
    told = nullcontext() if works else pytest.warns(UserWarning, match="C compiler")
    with told:
        assert choose_elementwise(torch.device("cuda"), torch.bfloat16) is (kernels if works else TORCH)
