"""Uses of adapters: halved with time, counted in windows, by pairs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.use_based import AdapterUsage

JOBS = st.lists(st.tuples(st.floats(0, 50), st.sets(st.sampled_from("abcd"), max_size=3)), max_size=40)


@given(JOBS)
def test_uses_are_those_of_their_definition(jobs: list[tuple[float, set[str]]]) -> None:
    uses, now, seen = AdapterUsage(half_life_s=100.0, window_s=60.0), 0.0, list[tuple[float, set[str]]]()
    for pause_s, asked in jobs:
        now += pause_s
        uses.see(asked, now)
        seen.append((now, asked))
    for digest in "abcd":
        expected = sum(0.5 ** ((now - at) / 100.0) for at, asked in seen if digest in asked)
        assert uses.lately(digest, now) == pytest.approx(expected)
        assert uses.counts(30.0, now)[digest] == sum(
            at >= now - 30.0 and digest in asked for at, asked in seen
        )
    assert uses.together(60.0, now)["a", "b"] == sum(
        at >= now - 60.0 and {"a", "b"} <= asked for at, asked in seen
    )
