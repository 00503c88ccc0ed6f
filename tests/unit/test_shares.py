from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from giornata.shares import KEPT, LINGER_S, SharedPool, TenantAllocation, has_room

CAPACITY = 100
WEIGHTS = {"alice": 1.0, "bob": 2.0, "carol": 0.5}


def several() -> bool:
    """Whether no second tenant can come."""
    return False


def loose(tenant: str) -> TenantAllocation:
    return TenantAllocation(tenant, WEIGHTS.get(tenant, 1.0), lambda: True)


def hold(pool: SharedPool, tenant: str, amounts: list[int], *, now: float = 0.0) -> list[TenantAllocation]:
    made = [loose(tenant) for _ in amounts]
    for one, amount in zip(made, amounts, strict=True):
        assert pool.take(one, amount, now)
    return made


def test_one_tenant_alone_may_hold_everything_and_anything_where_nothing_is_held() -> None:
    pool = SharedPool(CAPACITY, several)
    held = hold(pool, "alice", [10] * 10)
    assert not pool.take(loose("alice"), 1, 0.0)
    for one in held:
        pool.give_back(one)
    assert pool.take(loose("alice"), 10 * CAPACITY, 0.0)


def test_what_rests_for_longest_is_taken_back_at_once_for_who_has_less() -> None:
    pool = SharedPool(CAPACITY, several)
    first, second, third = hold(pool, "alice", [30, 30, 40])
    gone: list[TenantAllocation] = []
    pool.take(first, 0, 5.0)
    second.revoke = lambda: gone.append(second)
    assert pool.take(loose("bob"), 20, 6.0)
    assert (gone, pool.outcomes) == ([second], {("alice", "taken_back"): 1})
    assert (pool.held("alice"), pool.held("bob"), second.amount) == (70, 20, 0)
    assert third.amount == 40


def test_who_has_more_than_the_others_gets_nothing_of_theirs() -> None:
    pool = SharedPool(CAPACITY, several)
    hold(pool, "alice", [60])
    hold(pool, "dave", [40])
    assert not pool.take(loose("dave"), 30, 0.0)
    assert pool.used == CAPACITY


def test_a_holding_is_not_taken_back_before_its_grace_is_over() -> None:
    pool = SharedPool(CAPACITY, several, grace_s=2.0)
    hold(pool, "alice", [100])
    assert not pool.take(loose("bob"), 10, 1.0)
    assert pool.take(loose("bob"), 10, 2.0)


@pytest.mark.parametrize("tenant", ["bob", "alice"])
def test_room_is_kept_for_a_while_for_what_another_held_a_moment_ago(tenant: str) -> None:
    pool = SharedPool(CAPACITY, several)
    (own,) = hold(pool, "bob", [20])
    hold(pool, "alice", [10] * 8)
    pool.give_back(own)
    assert pool.take(loose(tenant), 0, 0.0), "nothing always fits"
    assert pool.take(loose(tenant), 20, LINGER_S - 0.1) == (tenant == "bob")
    assert tenant == "bob" or pool.take(loose("alice"), 20, LINGER_S)


def test_nothing_is_kept_from_a_tenant_within_its_share() -> None:
    pool = SharedPool(CAPACITY, several)
    hold(pool, "bob", [48])
    hold(pool, "alice", [6])
    assert not pool.take(loose("bob"), 47, 0.0)
    assert pool.take(loose("alice"), 22, 2.0)


def test_firm_holdings_leave_a_quarter_to_whoever_comes() -> None:
    pool = SharedPool(CAPACITY, several)
    for _ in range(5):
        assert pool.take(TenantAllocation("alice"), int(CAPACITY * (1 - KEPT)) // 5, 0.0)
    assert not pool.take(TenantAllocation("alice"), 1, 0.0)
    assert pool.take(TenantAllocation("bob"), 20, 0.0)
    alone = SharedPool(CAPACITY)
    assert alone.take(TenantAllocation("alice"), 99, 0.0)
    assert alone.take(TenantAllocation("alice"), 1, 0.0)


def test_room_among_firm_holdings_counts_all_that_is_held_in_any_order() -> None:
    for held in ({"bob": 25, "alice": 75}, {"alice": 75, "bob": 25}, {"alice": 90, "bob": 30}):
        for tenant in ("alice", "bob", "carol"):
            assert not has_room(held, tenant, 1, CAPACITY, alone=False), (held, tenant)
    assert not has_room({"alice": 75}, "alice", 1, CAPACITY, alone=False)
    assert has_room({"alice": 75}, "bob", 25, CAPACITY, alone=False)
    assert has_room({"alice": 75}, "alice", 25, CAPACITY, alone=True)


def test_a_pool_that_renews_takes_the_oldest_of_who_has_most_and_never_refuses() -> None:
    pool = SharedPool(4, renews=True)
    (other,) = hold(pool, "bob", [1])
    first, *_ = hold(pool, "alice", [1, 1, 1])
    hold(pool, "alice", [1], now=1.0)
    assert (first.amount, other.amount, pool.held("alice")) == (0, 1, 3)
    hold(pool, "carol", [1], now=2.0)
    assert (other.amount, pool.held("alice"), pool.used) == (1, 2, 4)


class SharedPoolMachine(RuleBasedStateMachine):
    """Any sequence of takes and ends, on a clock that only moves forward."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.now = SharedPool(CAPACITY, several, grace_s=2.0), 0.0
        self.held: list[TenantAllocation] = []
        self.revoked: list[TenantAllocation] = []

    @rule(tenant=st.sampled_from(sorted(WEIGHTS)), amount=st.integers(1, 60))
    def takes(self, tenant: str, amount: int) -> None:
        holding, idle = loose(tenant), not self.pool.used
        alone = not any(one.amount for one in self.held if one.tenant != tenant)
        rested = all(self.now - one.moved_s >= 2.0 for one in self.held)
        gone = self.revoked = list[TenantAllocation]()
        holding.revoke = lambda: self.revoked.append(holding)
        if not self.pool.take(holding, amount, self.now):
            active = {one.tenant: one.weight for one in self.held if one.amount} | {tenant: holding.weight}
            share = CAPACITY * holding.weight / sum(active.values())
            within = self.pool.held(tenant) + amount <= share
            assert not (rested and within and not alone), (
                "a tenant within its share waits for the grace alone"
            )
        else:
            assert all(one.tenant != tenant and one.amount == 0 for one in gone)
            assert all(self.now - one.moved_s >= 2.0 for one in gone)
            assert idle or self.pool.used <= CAPACITY
            self.held.append(holding)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def ends(self, data: st.DataObject) -> None:
        holding = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.give_back(holding)
        self.pool.give_back(holding)

    @rule(seconds=st.floats(0.1, 12))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds

    @invariant()
    def what_is_counted_is_what_is_held(self) -> None:
        assert self.pool.used == sum(one.amount for one in self.held)
        for tenant in WEIGHTS:
            assert self.pool.held(tenant) == sum(one.amount for one in self.held if one.tenant == tenant)


TestAnySequence = SharedPoolMachine.TestCase


@given(st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, max_size=200))
def test_tenants_that_ask_for_ever_end_with_their_shares(order: list[str]) -> None:
    pool = SharedPool(CAPACITY, several)
    for now, tenant in enumerate(order + sorted(WEIGHTS) * 100):
        pool.take(loose(tenant), 1, float(now))
    whole = sum(WEIGHTS.values())
    for tenant, weight in WEIGHTS.items():
        assert abs(pool.held(tenant) - CAPACITY * weight / whole) <= 1 + weight


@given(
    held=st.dictionaries(st.sampled_from(["", *WEIGHTS]), st.integers(1, 60), max_size=4),
    tenant=st.sampled_from(list(WEIGHTS)),
    amount=st.integers(1, 40),
)
def test_who_has_most_of_what_was_measured_leaves_a_part_and_others_may_use_it(
    held: dict[str, int], tenant: str, amount: int
) -> None:
    pool = SharedPool(CAPACITY, several)
    pool.weight_of = lambda name: WEIGHTS.get(name, 1.0)
    pool.count(loose("dave"), 90, 0.0)
    pool.measured(held)
    free = CAPACITY - sum(held.values())
    level = (held.get(tenant, 0) + amount) / WEIGHTS[tenant]
    behind = any(has / WEIGHTS.get(name, 1.0) >= level for name, has in held.items() if name != tenant)
    for kept in (KEPT, KEPT / 2):
        room = free if behind or not held else free - kept * CAPACITY
        expected = amount <= room or not held
        assert pool.fits(TenantAllocation(tenant, WEIGHTS[tenant]), amount, 0.0, kept) == expected
    assert (pool.used, pool.held("dave")) == (sum(held.values()), 0)
