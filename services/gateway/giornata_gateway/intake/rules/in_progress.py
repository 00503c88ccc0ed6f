"""Which pictures each tenant has in progress at this gateway. Pure: the time is given.

An edit's pictures count until its answer, a job's until it has ended. The end of a job is heard as an event, which an
outage may swallow; so each job counts at the latest until its time is over.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass


@dataclass(frozen=True)
class _Hold:
    pictures: int
    until_s: float


class InProgress:
    """Counts pictures by tenant; every entry has a name of its own."""

    def __init__(self) -> None:
        self._held: defaultdict[str, dict[str, _Hold]] = defaultdict(dict)
        self._tenants: dict[str, str] = {}
        """By name of the entry."""

    def of(self, tenant: str, now_s: float) -> int:
        """Pictures that a tenant has in progress."""
        for name in [name for name, hold in self._held.get(tenant, {}).items() if hold.until_s <= now_s]:
            self.leave(name)
        return sum(hold.pictures for hold in self._held.get(tenant, {}).values())

    def __contains__(self, name: str) -> bool:
        """Whether the entry is counted."""
        return name in self._tenants

    def enter(self, tenant: str, name: str, pictures: int, until_s: float) -> None:
        """Count `pictures` under `name`, until it leaves or `until_s`; again under the same name: anew."""
        self.leave(name)
        self._held[tenant][name] = _Hold(pictures, until_s)
        self._tenants[name] = tenant

    def leave(self, name: str) -> None:
        """Count the entry no more, if it is still counted."""
        tenant = self._tenants.pop(name, None)
        if tenant is None:
            return
        del self._held[tenant][name]
        if not self._held[tenant]:
            del self._held[tenant]
