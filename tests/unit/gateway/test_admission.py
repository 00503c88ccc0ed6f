from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.errors import ServiceUnavailable, TooManyRequests
from giornata_gateway.intake.rules.admission import Admission


def test_rows_count_not_requests() -> None:
    admission = Admission(4)
    admission.enter(3)
    admission.enter(1)
    with pytest.raises(TooManyRequests):
        admission.enter(1)
    admission.leave(3)
    admission.enter(2)


def test_one_edit_larger_than_the_limit_fits_into_an_idle_gateway() -> None:
    admission = Admission(2)
    admission.enter(10)
    assert admission.taken == 10
    with pytest.raises(TooManyRequests):
        admission.enter(1)


def test_a_check_takes_nothing_and_refuses_what_would_be_refused() -> None:
    admission = Admission(2, "event streams")
    admission.enter(1)
    admission.check()
    assert admission.taken == 1
    with pytest.raises(TooManyRequests, match="2 event streams at a time"):
        admission.check(2)


def test_a_closed_gateway_admits_nothing() -> None:
    admission = Admission(2)
    admission.closed = True
    with pytest.raises(ServiceUnavailable):
        admission.enter(1)


def test_retry_after_follows_how_long_edits_take() -> None:
    admission = Admission(2)
    quick = admission.retry_after_s(4)
    for _ in range(30):
        admission.enter(1)
        admission.leave(1, seconds=20)
    assert admission.retry_after_s(4) > quick >= 1
    assert admission.retry_after_s(4) == pytest.approx(40, abs=1)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(1, 10), st.booleans()), max_size=40))
def test_never_above_the_limit_but_for_one_alone(limit: int, requests: list[tuple[int, bool]]) -> None:
    admission = Admission(limit)
    held: list[int] = []
    for rows, leaves in requests:
        with contextlib.suppress(TooManyRequests):
            admission.enter(rows)
            held.append(rows)
        if leaves and held:
            admission.leave(held.pop(0))
        assert admission.taken == sum(held)
        assert admission.taken <= limit or len(held) == 1
