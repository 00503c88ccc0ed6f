"""What is left of a bandwidth for loads that can wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.residency.tiers import LoadTokenBucket


@given(st.lists(st.tuples(st.floats(0, 2), st.integers(1, 100)), max_size=50))
def test_planned_loads_that_wait_keep_to_the_bandwidth(loads: list[tuple[float, int]]) -> None:
    allowance, now, spent, last = LoadTokenBucket(100.0), 0.0, 0, 0
    for pause_s, size_bytes in loads:
        now += pause_s
        now += allowance.wait_s(now)
        allowance.spend(size_bytes, now)
        spent, last = spent + size_bytes, size_bytes
    assert spent - last <= 100.0 * (now + 1.0) + 1e-6


def test_demand_never_waits_and_planned_loads_wait_for_what_it_took() -> None:
    allowance = LoadTokenBucket(100.0)
    assert allowance.wait_s(0.0) == 0.0
    allowance.spend(150, 0.0)
    assert allowance.wait_s(0.0) == 0.5
    allowance.spend(1000, 0.0)
    assert allowance.wait_s(0.0) == 1.0  # it owes no more than a second's
    assert allowance.wait_s(2.0) == 0.0
