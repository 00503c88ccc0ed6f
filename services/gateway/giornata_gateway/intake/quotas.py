"""Limits of each tenant at this gateway: pictures in progress, and pictures in a minute.

The minute is a token bucket by GCRA: it is full with a minute's pictures, an edit takes as many tokens as it has
pictures, and a token comes back every 60 s / limit. Unlike a window it needs one number per tenant, and knows to the
moment when an edit of n pictures fits again, which is what Retry-After says. The price: after a quiet minute a tenant
may spend the full bucket and what flows in meanwhile, up to twice its limit in 60 s; over time the limit holds.

Each gateway counts for itself, from its start.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from giornata.wire.errors import ConcurrencyLimited, InvalidField, RateLimited
from giornata_gateway.intake.rules.tenants import Tenant

if TYPE_CHECKING:
    from throttled import Throttled

MAX_TENANTS: Final = 100_000
"""Buckets that are remembered. Beyond it the least recently used bucket is forgotten, and so is full again."""


class PicturesInProgress:
    """Counts pictures by tenant; every entry has a name of its own.

    An edit's pictures count until its answer, a job's until it has ended. The end of a job is heard as an event, which
    an outage may swallow, so each job counts at most until its time is over.
    """

    def __init__(self) -> None:
        self._held: defaultdict[str, dict[str, tuple[int, float]]] = defaultdict(dict)
        """By tenant and name: pictures, and the second until which they count."""
        self._tenants: dict[str, str] = {}
        """Tenants by the name of their entry."""

    def of(self, tenant: str, now_s: float) -> int:
        """Pictures that a tenant has in progress."""
        held = self._held[tenant]
        for name in [name for name, (_, until_s) in held.items() if until_s <= now_s]:
            self.leave(name)
        return sum(pictures for pictures, _ in held.values())

    def __contains__(self, name: str) -> bool:
        """Whether the entry is counted."""
        return name in self._tenants

    def enter(self, tenant: str, name: str, pictures: int, until_s: float) -> None:
        """Count `pictures` under `name`, which is not counted yet, until it leaves, at most until `until_s`."""
        self._held[tenant][name] = (pictures, until_s)
        self._tenants[name] = tenant

    def leave(self, name: str) -> None:
        """Count the entry no more, if it is still counted."""
        tenant = self._tenants.pop(name, None)
        if tenant is not None:
            del self._held[tenant][name]


class Quotas:
    """Counts what tenants do.

    `estimate` gives the seconds until a number of pictures should be done, when another number is worked on at a time;
    `refused` is told tenant and code of every refusal.
    """

    def __init__(
        self,
        estimate: Callable[[int, int], float],
        refused: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._estimate, self._refused, self._clock = estimate, refused, clock
        from throttled.store import MemoryStore  # noqa: PLC0415 - brings Redis' client: seeing.switching.off is before it

        self._in_progress = PicturesInProgress()
        self._buckets = MemoryStore(options={"MAX_SIZE": MAX_TENANTS})

    def check(self, tenant: Tenant) -> None:
        """Raise what :meth:`enter` would raise now for one picture."""
        self._check_in_progress(tenant, 1)
        if tenant.per_minute and self._bucket(tenant).peek(tenant.name).remaining < 1:
            self._take(tenant, 1)  # raises, and knows how long to wait

    def enter(
        self, tenant: Tenant, pictures: int, name: str, longest_s: float, *, always: bool = False
    ) -> bool:
        """Count `pictures` as asked for, and as in progress until `name` leaves, at most for `longest_s`.

        Returns False where `name` is in progress already, as with a repeated request, which `always` counts as asked
        for all the same.

        Raises:
            InvalidField: more pictures than the tenant may ever ask for at once.
            ConcurrencyLimited, RateLimited: not now; says when.
        """
        known = name in self._in_progress
        if known and not always:
            return False
        for limit, period in ((tenant.in_progress, "at a time"), (tenant.per_minute, "a minute")):
            if limit and pictures > limit:
                raise InvalidField(
                    "The tenant may not ask for so many pictures.",
                    field="n",
                    received=pictures,
                    accepted=f"at most {limit} pictures {period}",
                )
        if not known:
            self._check_in_progress(tenant, pictures)
        if tenant.per_minute:
            self._take(tenant, pictures)
        if not known:
            self._in_progress.enter(tenant.name, name, pictures, self._clock() + longest_s)
        return not known

    def leave(self, name: str) -> None:
        """An edit is done, or a job has ended; what is not counted any more is no mistake."""
        self._in_progress.leave(name)

    def in_progress(self, tenant: Tenant) -> int:
        """Pictures that a tenant has in progress."""
        return self._in_progress.of(tenant.name, self._clock())

    def headers(self, tenant: Tenant) -> dict[str, str]:
        """The RateLimit headers (draft-ietf-httpapi-ratelimit-headers-10); none where the tenant has no limit."""
        if not tenant.per_minute:
            return {}
        state = self._bucket(tenant).peek(tenant.name)
        return {
            "RateLimit-Policy": f'"pictures";q={tenant.per_minute};w=60',
            "RateLimit": f'"pictures";r={state.remaining};t={math.ceil(state.reset_after)}',
        }

    def _check_in_progress(self, tenant: Tenant, pictures: int) -> None:
        if not tenant.in_progress:
            return
        taken = self._in_progress.of(tenant.name, self._clock())
        excess = taken + pictures - tenant.in_progress
        if excess > 0:
            self._refused(tenant.name, ConcurrencyLimited.code)
            raise ConcurrencyLimited(
                received=f"{pictures} pictures while {taken} are in progress",
                accepted=f"{tenant.in_progress} pictures at a time",
                retry_after_s=self._estimate(excess, tenant.in_progress),
            )

    def _take(self, tenant: Tenant, pictures: int) -> None:
        result = self._bucket(tenant).limit(tenant.name, cost=pictures)
        if result.limited:
            self._refused(tenant.name, RateLimited.code)
            raise RateLimited(
                received=f"{pictures} pictures",
                accepted=f"{tenant.per_minute} pictures a minute, {result.state.remaining} of them now",
                retry_after_s=result.state.retry_after,
            )

    def _bucket(self, tenant: Tenant) -> Throttled:
        from throttled import Throttled, per_min  # noqa: PLC0415 - as above

        quota = per_min(tenant.per_minute, burst=tenant.per_minute)
        return Throttled(using="gcra", quota=quota, store=self._buckets)
