"""Which sample of a ControlNet goes behind which block, against the lines of diffusers' forward."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from giornata.control.expansion import Blocks, sample_of

COUNTS = st.integers(1, 20)


@given(double=COUNTS, single=COUNTS, doubles=COUNTS, singles=COUNTS, repeats=st.booleans())
def test_it_is_the_one_that_diffusers_adds(
    double: int, single: int, doubles: int, singles: int, repeats: bool
) -> None:
    base, samples = Blocks(double, single), Blocks(min(doubles, double), min(singles, single))
    interval = math.ceil(double / samples.double)
    expected = [block % samples.double if repeats else block // interval for block in range(double)]
    interval = math.ceil(single / samples.single)
    expected += [samples.double + block // interval for block in range(single)]
    assert [sample_of(block, base, samples, repeats=repeats) for block in range(base.all)] == expected
    assert all(index < samples.all for index in expected)


def test_without_samples_of_a_kind_nothing_is_added_there() -> None:
    base = Blocks(2, 3)
    assert [sample_of(b, base, Blocks(1, 0)) for b in range(5)] == [0, 0, None, None, None]
    assert [sample_of(b, base, Blocks(0, 1)) for b in range(5)] == [None, None, 0, 0, 0]
