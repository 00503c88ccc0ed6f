"""A bounded pool that tenants share by weight: a tenant may use idle room, and gives it back to one with less. Pure.

The level of a tenant is what it holds over its weight. Where a pool is full, room comes from a tenant whose level is
above what the asking one's would then be: weighted max-min fairness. So a tenant within its share among those that hold
something waits for at most the pool's grace, and a tenant alone may hold everything.

A holding that cannot be taken back, such as an edit in progress, is *firm*. A quarter of a pool is kept from the tenant
that has most: for tenants that held room in the last seconds and, where its holding is firm, for new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

KEPT: Final = 0.25
"""At most this part of a pool is kept from the tenant that has most of it."""
LINGER_S: Final = 10.0
"""Room that a tenant held is kept for it for this long."""


def firm() -> bool:
    """A firm holding is never takeable: nothing takes it back before its own end."""
    return False


@dataclass(eq=False)
class TenantAllocation:
    """A part of a pool that one request or connection of a tenant has."""

    tenant: str
    weight: float = 1.0
    takeable: Callable[[], bool] = firm
    """Says whether the pool may take it back now."""
    revoke: Callable[[], object] = firm
    """The pool calls it when it takes the holding back."""
    amount: int = 0
    moved_s: float = 0.0
    """Time of its last growth: of a tenant's holdings the one that rests for longest goes first."""


@dataclass
class _Tenant:
    weight: float
    held: int = 0
    holdings: dict[TenantAllocation, None] = field(default_factory=dict)
    wanted: int = 0
    """The most that it held or asked for lately."""
    until_s: float = 0.0


class SharedPool:
    """Room for `capacity` of anything, on the clock of `now`; a holding that moved within `grace_s` is not taken back.

    `alone` says whether no second tenant can come: then nothing is kept for it. A pool that `renews` takes of the
    tenant that has most, the asking one too, whatever they have.
    """

    def __init__(
        self,
        capacity: int,
        alone: Callable[[], bool] = lambda: True,
        *,
        grace_s: float = 0.0,
        renews: bool = False,
    ) -> None:
        self.capacity, self.grace_s, self._alone, self._renews = capacity, grace_s, alone, renews
        self.used = 0
        self.weight_of: Callable[[str], float] = lambda _: 1.0
        """Weighs tenants that were measured."""
        self.outcomes = Counter[tuple[str, str]]()
        """How often a tenant was `refused`, or a holding of it `taken_back`."""
        self._tenants: dict[str, _Tenant] = {}

    def held(self, tenant: str) -> int:
        """The amount that a tenant has."""
        return self._tenants[tenant].held if tenant in self._tenants else 0

    def fits(self, holding: TenantAllocation, amount: int, now: float, kept: float = KEPT) -> bool:
        """Return whether `amount` more is free for a holding; any amount is where nothing is held."""
        free, own = self.capacity - self.used, self._level(holding, amount)
        if not self.used or not amount:
            return True
        if amount > free:
            return False
        others = [one for name, one in self._tenants.items() if name != holding.tenant]
        if self._alone() or any(one.held / one.weight >= own for one in others):
            return True
        if holding.takeable is firm:
            return amount <= free - kept * self.capacity
        weights = sum(one.weight for one in others if one.held)
        if weights and own <= self.capacity / (weights + holding.weight):  # it is within its share
            return True
        asked = sum(max(0, one.wanted - one.held) for one in others if now < one.until_s)
        return amount <= free - min(kept * self.capacity, asked)

    def take(self, holding: TenantAllocation, amount: int, now: float) -> bool:
        """Give a holding `amount` more if it fits, at once or in the place of others; if not, room is kept for it."""
        tenant = self._tenant(holding, now)
        wanted = tenant.held + amount
        if now >= tenant.until_s or wanted >= tenant.wanted:
            tenant.wanted, tenant.until_s = wanted, now + LINGER_S
        gone: list[TenantAllocation] = []
        if not self.fits(holding, amount, now) and not (gone := self._owed(holding, amount, now)):
            return False
        for one in gone:
            self.outcomes["" if self._renews else one.tenant, "taken_back"] += 1
            self.give_back(one)
            one.revoke()
        self.count(holding, amount, now)
        return True

    def count(self, holding: TenantAllocation, amount: int, now: float) -> None:
        """Count `amount` more that a holding has, whether it fits or not."""
        tenant = self._tenant(holding, now)
        tenant.holdings[holding] = None
        holding.amount += amount
        holding.moved_s = now
        tenant.held += amount
        self.used += amount

    def measured(self, held: Mapping[str, int]) -> None:
        """Take in what tenants have now, all of it firm, in place of what was counted."""
        self.used = 0
        self._tenants.clear()
        for name, has in held.items():
            self.count(TenantAllocation(name, self.weight_of(name)), has, 0.0)

    def give_back(self, holding: TenantAllocation) -> None:
        """A holding ends, or is taken back; one that has nothing is no mistake."""
        tenant = self._tenants.get(holding.tenant)
        if tenant is not None and holding in tenant.holdings:
            del tenant.holdings[holding]
            tenant.held -= holding.amount
            self.used -= holding.amount
            holding.amount = 0

    def _owed(self, holding: TenantAllocation, amount: int, now: float) -> list[TenantAllocation]:
        """The holdings to take back so that `amount` is free for a tenant with less; none where they do not suffice."""
        needed, own = self.used + amount - self.capacity, self._level(holding, amount)
        levels = {name: one.held / one.weight for name, one in self._tenants.items()}
        able = [
            one
            for name, tenant in self._tenants.items()
            for one in (tenant.holdings if self._renews or name != holding.tenant else ())
            if now - one.moved_s >= self.grace_s and one.takeable()
        ]
        chosen: list[TenantAllocation] = []
        while needed > 0:
            first = max(able, key=lambda one: (levels[one.tenant], -one.moved_s), default=None)
            if first is None or (levels[first.tenant] <= own and not self._renews):
                return []
            able.remove(first)
            chosen.append(first)
            levels[first.tenant] -= first.amount / first.weight
            needed -= first.amount
        return chosen

    def _level(self, holding: TenantAllocation, amount: int) -> float:
        return (self.held(holding.tenant) + amount) / holding.weight

    def _tenant(self, holding: TenantAllocation, now: float) -> _Tenant:
        known = self._tenants.get(holding.tenant)
        if known is None:
            for name in [n for n, one in self._tenants.items() if not one.held and now >= one.until_s]:
                del self._tenants[name]
            known = self._tenants[holding.tenant] = _Tenant(holding.weight)
        known.weight = holding.weight
        return known


def has_room(held: Mapping[str, int], tenant: str, amount: int, capacity: int, *, alone: bool) -> bool:
    """Whether a tenant may have `amount` more where tenants have what is `held`, all of it firm and of equal weight."""
    pool = SharedPool(capacity, lambda: alone)
    pool.measured(held)
    return pool.fits(TenantAllocation(tenant), amount, 0.0)
