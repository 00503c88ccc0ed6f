"""The front of the quality benchmark is the set of variants that nothing beats."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.bench.reporting.pareto import front, pareto

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
    for axes, cost in zip(pareto(rows).axes, (10.0, 0.3), strict=True):
        best, *dots = axes.lines
        assert np.asarray(best.get_xydata()).tolist() == [[cost, 0.92]]
        assert [np.asarray(dot.get_xydata()).tolist() for dot in dots] == [
            [[cost, y]] for y in (0.9, 0.91, 0.92)
        ]
        assert all(f"halo {halo}" in str(dot.get_label()) for halo, dot in enumerate(dots))
        assert len({dot.get_markersize() for dot in dots}) == 3
