"""Trends of a soak, of made-up samples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.rehearsals.chaos.flat import Sample, trends

MEMORY = "router-1 memory, MiB"


def samples(value: Callable[[int], float], n: int = 40) -> list[Sample]:
    return [Sample(20.0 * turn, {MEMORY: value(turn)}) for turn in range(n)]


@given(st.floats(10, 2000), st.integers(8, 200))
def test_what_fills_a_cache_first_and_then_stays_is_flat(level: float, n: int) -> None:
    [trend] = trends(samples(lambda turn: level * min(1.0, (turn + 1) / (n // 4 + 1)), n))
    assert trend.flat
    assert trend.most <= level * 1.001


@pytest.mark.parametrize(("mib_a_sample", "flat"), [(0.1, True), (1.0, True), (2.0, False), (5.0, False)])
def test_what_grows_all_the_time_is_not(mib_a_sample: float, *, flat: bool) -> None:
    [trend] = trends(samples(lambda turn: 100 + mib_a_sample * turn))
    assert trend.flat is flat


def test_a_process_that_has_ended_has_no_trend() -> None:
    told = samples(lambda _: 100.0)
    assert trends([*told[:-1], Sample(told[-1].at_s, {"other": 1.0})]) == []


def test_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 8 samples, received 7"):
        trends(samples(lambda _: 1.0, 7))
