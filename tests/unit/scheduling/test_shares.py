"""Tenants take turns by their shares, none is starved, and none is remembered for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.scheduling.shares import FairShares

MANY = 1000


def test_tenants_that_come_once_are_forgotten_while_another_always_waits() -> None:
    shares, most = FairShares(), 0
    shares.join("lasting", 1.0)
    for number in range(MANY):
        shares.join(f"t{number}", 1.0)
        shares.charge(f"t{number}", 10.0)
        shares.leave(f"t{number}")
        if number % 4 == 3:
            shares.charge("lasting", 10.0)
        most = max(most, len(shares))
    assert most < 20


def test_new_tenants_without_end_do_not_starve_one_that_waits() -> None:
    shares, served = FairShares(), 0
    shares.join("old", 1.0)
    shares.charge("old", 100.0)
    for number in range(MANY):
        shares.join(new := f"t{number}", 1.0)
        if shares.tag("old") <= shares.tag(new):
            shares.charge("old", 10.0)
            served += 1
        shares.charge(new, 10.0)
        shares.leave(new)
    assert served >= MANY // 3


def test_a_tenant_that_comes_and_goes_unserved_is_noted_once() -> None:
    shares = FairShares()
    shares.join("lasting", 1.0)
    shares.join("fickle", 1.0)
    for _ in range(2):
        shares.charge("lasting", 10.0)
        shares.charge("fickle", 100.0)
        for _ in range(MANY):
            shares.leave("fickle")
            shares.join("fickle", 1.0)
    shares.leave("fickle")
    assert len(shares) < 10


def test_a_tenant_keeps_what_it_had_beyond_its_share_while_others_wait() -> None:
    shares = FairShares()
    shares.join("a", 1.0)
    shares.join("b", 1.0)
    shares.charge("a", 10.0)
    shares.leave("a")
    shares.join("a", 1.0)
    assert shares.tag("a") > shares.tag("b")


moves = st.lists(
    st.tuples(st.sampled_from("abcd"), st.sampled_from(["join", "serve", "leave"]), st.integers(1, 50)),
    max_size=200,
)


@given(moves, st.floats(0.1, 10))
def test_a_tag_never_goes_back(done: list[tuple[str, str, int]], weight: float) -> None:
    shares, waiting, tags = FairShares(), dict.fromkeys("abcd", 0), dict.fromkeys("abcd", 0.0)
    for tenant, what, work in done:
        if what == "join":
            shares.join(tenant, weight)
            waiting[tenant] += 1
        elif waiting[tenant] and what == "serve":
            shares.charge(tenant, work)
        elif waiting[tenant]:
            shares.leave(tenant)
            waiting[tenant] -= 1
        for other, count in waiting.items():
            if count:
                assert shares.tag(other) >= tags[other]
                tags[other] = shares.tag(other)
