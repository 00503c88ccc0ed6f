"""The effective alpha on its way from the inspection to the finishing: bit for bit, and small."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from giornata_prepost.images.masks import Alpha, effective_alpha, pack, unpack


@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 30), st.integers(1, 30)),
        elements=st.sampled_from([0.0, 0.001953125, 0.3, 1.0]),
    )
)
def test_an_alpha_comes_out_as_it_went_in(alpha: Alpha) -> None:
    found = unpack(pack(alpha))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, alpha)


def test_a_feathered_mask_is_a_fraction_of_its_pixels() -> None:
    region = np.zeros((512, 512), np.bool_)
    region[100:300, 150:400] = True
    alpha = effective_alpha(region, 4, 4.0)
    assert len(pack(alpha)) < alpha.nbytes / 30
