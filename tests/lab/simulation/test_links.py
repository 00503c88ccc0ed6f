"""A link: one load at a time, in order, none shorter than its bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata_lab.simulation.residency import FifoLink


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 1000)), max_size=30))
def test_loads_come_one_after_the_other(loads: list[tuple[float, int]]) -> None:
    link, now, before = FifoLink(100.0, 0.5), 0.0, 0.0
    for pause_s, size_bytes in loads:
        now += pause_s
        wait_s = link.wait_s(now)
        assert wait_s == pytest.approx(max(0.0, before - now))
        before = link.load(size_bytes, now)
        assert before == pytest.approx(now + wait_s + 0.5 + size_bytes / 100.0)


def test_rocks_updates_are_reproduced() -> None:
    """ROCK Table 3: an adapter of 65 MB takes 4.8 s from the host, 6.8 s from the store."""
    store, host = FifoLink(65e6, 1.0), FifoLink(80e6, 4.0)
    there = store.load(65e6, 0.0)
    assert there == pytest.approx(2.0)
    assert host.load(65e6, there) == pytest.approx(6.8, abs=0.02)
    assert host.takes_s(65e6) == pytest.approx(4.8, abs=0.02)
