"""Whose turn it is among tenants: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Pure.

Every tenant has a start tag: the virtual time at which its next work begins. The tenant with the least tag is next, and
what it is served moves its tag on by the work over its weight. So a tenant with a thousand jobs delays another tenant's
single job by about one job, and the order of a tenant's own jobs is free.

Virtual time moves on by the work over the weights of all tenants that wait (WF2Q+, Bennett and Zhang, INFOCOM 1996).
It passes every tag in the end: no stream of new tenants starves an old one, and no tenant is remembered for ever.
"""

from __future__ import annotations

from heapq import heappop, heappush


class FairShares:
    """The start tags of tenants that wait, and of tenants that had more than their share lately."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._tags: dict[str, float] = {}
        self._waiting: dict[str, tuple[int, float]] = {}
        """How many jobs of a tenant wait, and its weight."""
        self._weights = 0.0
        """Their sum."""
        self._idle: list[tuple[float, str]] = []
        """A heap of the tags of tenants that wait no longer, and of some that have come back since."""
        self._noted: set[tuple[float, str]] = set()
        """What is in the heap."""

    def __len__(self) -> int:
        return len(self._tags) + len(self._idle)

    def tag(self, tenant: str) -> float:
        """Where the next work of a tenant that waits begins, in virtual time."""
        return self._tags[tenant]

    def join(self, tenant: str, weight: float) -> None:
        """One more job of `tenant` waits; `weight`, above 0, is the tenant's from now on."""
        jobs, before = self._waiting.get(tenant, (0, 0.0))
        if not jobs:
            self._tags[tenant] = max(self._virtual, self._tags.get(tenant, 0.0))
        self._waiting[tenant] = jobs + 1, weight
        self._weights += weight - before

    def leave(self, tenant: str) -> None:
        """One job of `tenant` waits no longer, served or not."""
        jobs, weight = self._waiting.pop(tenant)
        if jobs > 1:
            self._waiting[tenant] = jobs - 1, weight
            return
        self._weights = self._weights - weight if self._waiting else 0.0  # no rounding adds up
        note = self._tags[tenant], tenant
        if note not in self._noted:
            self._noted.add(note)
            heappush(self._idle, note)
        self._forget()

    def charge(self, tenant: str, work: float) -> None:
        """Serve `work` of a tenant that waits."""
        tag, (_, weight) = self._tags[tenant], self._waiting[tenant]
        self._virtual += work / self._weights
        self._tags[tenant] = tag + work / weight
        self._forget()

    def _forget(self) -> None:
        """Forget tenants that do not wait and that virtual time has passed."""
        while self._idle and self._idle[0][0] <= self._virtual:
            note = heappop(self._idle)
            self._noted.discard(note)
            tenant = note[1]
            if tenant not in self._waiting and self._tags.get(tenant, 0.0) <= self._virtual:
                self._tags.pop(tenant, None)
