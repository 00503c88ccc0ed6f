"""Time that grows with an amount, from what amounts took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.adapters import KEPT, UnitTime

AMOUNTS = st.floats(1, 1e6)
TIMES = st.floats(0.001, 1e6)


def test_nothing_is_known_before_anything_was_observed() -> None:
    assert UnitTime().ms(100) == 0.0


@given(st.lists(st.tuples(AMOUNTS, TIMES), min_size=1, max_size=20), AMOUNTS)
def test_a_rate_lies_between_those_observed_and_is_linear(
    seen: list[tuple[float, float]], asked: float
) -> None:
    rate = UnitTime()
    for amount, ms in seen:
        rate.observe(amount, ms)
    ratios = [ms / amount for amount, ms in seen]
    assert min(ratios) * (1 - 1e-9) <= rate.ms(asked) / asked <= max(ratios) * (1 + 1e-9)
    assert rate.ms(2 * asked) == pytest.approx(2 * rate.ms(asked))


def test_what_changed_is_known_soon() -> None:
    rate = UnitTime()
    for _ in range(100):
        rate.observe(10, 10)
    for _ in range(22):  # a tenth of what was known is left
        rate.observe(10, 100)
    assert KEPT**22 < 0.1
    assert rate.ms(1) > 9
