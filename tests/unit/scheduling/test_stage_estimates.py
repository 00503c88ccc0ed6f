"""What stages beside denoising take, from what they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.estimates import StageEstimates
from giornata.scheduling.unit_time import KEPT, UnitTime

AMOUNTS = st.floats(1, 1e6)
TIMES = st.floats(0.001, 1e6)


def test_nothing_is_known_before_anything_was_observed() -> None:
    times = StageEstimates()
    assert times.prepare_ms("m", 100) == times.finish_ms("m", 100) == 0.0
    assert times.finishing_ms("j", 0.0) is None


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


def test_models_and_stages_have_times_of_their_own() -> None:
    times = StageEstimates()
    times.prepared("small", 100, 20.0)
    times.prepared("large", 100, 200.0)
    times.begin_finish("j", "small", 400, now=5.0)
    times.end_finish("j", now=7.0, completed=True)
    assert times.prepare_ms("small", 50) == pytest.approx(10.0)
    assert times.prepare_ms("large", 50) == pytest.approx(100.0)
    assert times.finish_ms("small", 100) == pytest.approx(500.0)
    assert times.finish_ms("large", 100) == 0.0


def test_a_finish_that_goes_on_has_less_and_less_left() -> None:
    times = StageEstimates()
    times.begin_finish("first", "m", 100, now=0.0)
    assert times.finishing_ms("first", 1.0) == 0.0, "nobody knows how long it takes"
    times.end_finish("first", now=4.0, completed=True)
    times.begin_finish("second", "m", 50, now=10.0)
    left = [times.finishing_ms("second", now) for now in (10.0, 11.5, 13.0)]
    assert left == pytest.approx([2000.0, 500.0, 0.0])


def test_a_finish_that_failed_tells_nothing() -> None:
    times = StageEstimates()
    times.begin_finish("j", "m", 100, now=0.0)
    times.end_finish("j", now=0.001, completed=False)
    assert times.finish_ms("m", 100) == 0.0
    assert times.finishing_ms("j", 1.0) is None
    times.end_finish("unknown", now=1.0, completed=True)
