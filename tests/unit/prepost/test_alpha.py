"""The effective alpha on its way from the inspection to the finishing: bit for bit, and small."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from safetensors.numpy import save

from giornata_prepost.images.masks import LEVELS, Alpha, effective_alpha, pack, unpack


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 30), st.integers(1, 30)),
        elements=st.sampled_from([np.float32(n) / np.float32(LEVELS) for n in (0, 1, 8, 1234, LEVELS)]),
    )
)
def test_an_alpha_comes_out_as_it_went_in(alpha: Alpha) -> None:
    found = unpack(pack(alpha))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, alpha)


@pytest.mark.parametrize(("grow", "blur"), [(4, 4.0), (64, 32.0), (0, None)])
def test_a_feathered_mask_is_a_fraction_of_its_pixels(grow: int, blur: float | None) -> None:
    """A wide feather as well: many large pictures in progress would fill the store with theirs."""
    region = np.zeros((512, 512), np.bool_)
    region[100:300, 150:400] = True
    alpha = effective_alpha(region, grow, blur)
    data = pack(alpha)
    assert len(data) < alpha.nbytes / 20
    np.testing.assert_array_equal(unpack(data), alpha)


def test_what_an_older_version_packed_is_read() -> None:
    alpha = np.array([[0.25, 1.0]], np.float32)
    place = np.array([2, 3, 1, 1, 2, 1], np.int64)
    found = unpack(zlib.compress(save({"place": place, "alpha": alpha})))
    np.testing.assert_array_equal(found, [[0, 0, 0], [0, 0.25, 1]])
