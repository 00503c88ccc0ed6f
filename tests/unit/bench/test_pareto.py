"""The front of the quality benchmark is the set of variants that nothing beats."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.bench.reporting.pareto import front, pareto

VALUES = st.floats(0, 1, allow_nan=False)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12))
def test_nothing_beats_the_front_and_it_beats_all_others(points: list[tuple[float, float]]) -> None:
    found = front(points)
    for cost, quality in points:
        better = [p for p in points if p[0] <= cost and p[1] >= quality and p != (cost, quality)]
        assert ((cost, quality) in found) == (not better)


def test_the_drawing_names_every_variant() -> None:
    rows = [
        {
            "form": "kv",
            "halo": halo,
            "corrected": True,
            "SSIM box": 0.9 + halo / 100,
            "KiB": 10.0,
            "tokens of full": 0.3,
        }
        for halo in range(3)
    ]
    drawn = pareto(rows)
    assert drawn.count("<circle") == 6
    assert all(f"halo {halo}" in drawn for halo in range(3))
