"""Stored activations of some channels: what is narrowed and then read equals what is read and then narrowed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata_denoiser.choices import BITS
from giornata_denoiser.rows.stored import StoredTensor, store

HALF = 6


@given(
    bits=st.sampled_from(BITS),
    bounds=st.lists(st.integers(0, HALF), min_size=2, max_size=4, unique=True).map(sorted),
    seed=st.integers(0, 1000),
)
def test_narrowing_equals_slicing_what_is_dequantised(bits: int, bounds: list[int], seed: int) -> None:
    """Ranges of an even number of channels, before, behind and across the middle of those that 4 bits pack."""
    whole = store(torch.randn(7, 2 * HALF, generator=torch.Generator().manual_seed(seed)), bits)
    spans = [slice(2 * start, 2 * stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=False)]
    narrow = whole.narrowed(spans)
    index = torch.tensor([4, 0, 6])
    wanted = torch.cat([read(whole, index)[:, span] for span in spans], dim=1)
    assert narrow.bits == bits
    assert narrow.shape == (7, wanted.shape[1])
    torch.testing.assert_close(read(narrow, index), wanted, rtol=0, atol=0)
    torch.testing.assert_close(narrow.levels.rows(index).float(), wanted, rtol=0, atol=1e-6)


def read(stored: StoredTensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty(len(index), stored.channels)
    stored.gather(index, out)
    return out


def test_an_odd_number_of_channels_has_no_4_bits() -> None:
    with pytest.raises(ValueError, match="received 3 channels in 4 bits; accepted are even numbers"):
        store(torch.randn(2, 8), 4).narrowed([slice(0, 3)])


@pytest.mark.parametrize("bits", BITS)
def test_no_token_at_all_is_stored(bits: int) -> None:
    stored = store(torch.empty(0, 4), bits)
    assert (stored.shape, stored.finite) == ((0, 4), True)
