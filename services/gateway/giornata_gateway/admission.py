"""Admission: the API keys of those who ask, and how many places and bytes of this gateway they may hold."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Final

import structlog

from giornata.api_keys import KeysFile, KeysFileError, TenantLimits, hash_of, parse
from giornata.shares import SharedPool, TenantAllocation, firm
from giornata.wire import subjects
from giornata.wire.errors import (
    ConcurrencyLimited,
    InvalidField,
    Overloaded,
    RateLimited,
    ServiceUnavailable,
    TooManyRequests,
    Unauthorized,
)

if TYPE_CHECKING:
    from throttled import Throttled

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class Tenant:
    """The owner of a request, and what it may do at this gateway."""

    name: str
    in_progress: int = 0
    """Pictures in progress at a time; 0: no limit of its own."""
    per_minute: int = 0
    """Pictures asked for in a minute; 0: no limit."""
    weight: float = 1.0
    """Share beside other tenants."""
    operator: bool = False
    """An operator sees hosts, instances and the load of others."""
    inbox: str = subjects.INBOX
    """Prefix of the subjects to which answers over NATS may go: the asking application's."""


def tenant_of(key: str | None, file: KeysFile | None, defaults: Tenant) -> Tenant:
    """The tenant that `key` stands for; its hash is compared with every known one, each in constant time.

    Args:
        key: as the request brings it; Unauthorized where keys are asked for and it is none of them.
        file: the known keys; None where no key is asked for.
        defaults: the tenant of a gateway without keys, and the limits of a tenant without limits of its own.
    """
    if file is None:
        return replace(defaults, operator=True)
    if key is None:
        raise Unauthorized(
            "An API key is needed.", accepted="the header Authorization: Bearer KEY, or api_key over NATS"
        )
    given = hash_of(key)
    found = [known for known in file.keys if hmac.compare_digest(known.sha256, given)]
    if not found:
        raise Unauthorized
    name, inbox = found[-1].tenant, found[-1].inbox
    limits = file.tenants.get(name, TenantLimits())
    return replace(defaults, name=name, inbox=inbox, **limits.model_dump(exclude_none=True))


LOOK_S: Final = 1.0
"""The file is looked at when a request comes, at most this often: a revoked key opens nothing for longer."""

_Version = tuple[int, int, int]
"""Inode, time of the last change in nanoseconds, and size: any change of the file changes them."""


class KeyFile:
    """The keys in a file; ServiceUnavailable where it is missing, or is not such a file.

    A new file that cannot be read is logged, and the keys before it stay.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._looked_s = clock()
        try:
            self._version: _Version | None = self._found()
            self._keys = parse(path.read_bytes())
        except (OSError, KeysFileError) as error:
            raise ServiceUnavailable(
                f"The API keys cannot be read from {path}: {_why(error)}.",
                accepted="a file that `giornata keys create` has made",
            ) from None
        if not self._keys.keys:
            log.warning("no_api_keys", path=str(path), means="every request is refused")

    @property
    def current(self) -> KeysFile:
        """The keys as the file has them, or had them when it could last be read."""
        now_s = self._clock()
        if now_s - self._looked_s < LOOK_S:
            return self._keys
        self._looked_s = now_s
        version: _Version | None = None
        try:
            version = self._found()
            if version != self._version:
                self._keys = parse(self._path.read_bytes())
                log.info("api_keys_read", path=str(self._path), keys=len(self._keys.keys))
        except (OSError, KeysFileError) as error:
            if version != self._version:
                kept = len(self._keys.keys)
                log.error("api_keys_not_read", path=str(self._path), why=_why(error), kept=kept)
        self._version = version  # found before the keys: a file that changed in between is read again
        return self._keys

    def _found(self) -> _Version:
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size


def _why(error: OSError | KeysFileError) -> str:
    return (error.strerror or type(error).__name__) if isinstance(error, OSError) else str(error)


# What this gateway holds at a time: pictures in progress, open event streams, and bytes of pictures.
#
# An edit holds as many places as it has pictures, from the moment its request is read until its job has
# ended; an asynchronous job only until it is accepted, since from there on the router's queue limit counts
# it. A request that is still being received holds no places, so that a slow client keeps no other client
# out; its bytes are counted. Uploads are refused above the limit of bytes, answers wait. Tenants share all
# of it (`giornata.shares`).


SMOOTHING: Final = 0.2
"""Weight of the latest edit in the running mean of how long a picture takes."""
RETRY_AFTER_S: Final = 2.0
ROOM_S: Final = 30.0
"""How long an answer waits for room."""
GRACE_S: Final = 2.0
"""An answer that is younger is not cut off for another tenant's."""


@dataclass
class AdmissionSlot:
    """The places that an admitted request holds until it ends."""

    seconds: float | None = None
    """How long the edit took, once it was carried out; None leaves the running mean as it is."""
    lasting: bool = False
    """The tenant's pictures count as in progress until the job's end is heard, not only while the places are held."""
    repeated: bool = False
    """The job was accepted for an earlier request with the same idempotency key."""


@asynccontextmanager
async def revocable(error: Callable[[], Overloaded]) -> AsyncIterator[Callable[[], None]]:
    """Yields a function that ends the work inside; `error` is raised then."""
    limit = asyncio.timeout(None)
    try:
        async with limit:
            yield partial(limit.reschedule, 0.0)
    except TimeoutError as late:
        if limit.expired():
            raise error() from late
        raise


class ConcurrencyLimiter:
    """Counts places against a limit. One request of any size fits into an idle gateway."""

    def __init__(
        self, pool: SharedPool, what: str = "pictures", refusal: type[Overloaded] = TooManyRequests
    ) -> None:
        self.pool, self.what, self._refusal = pool, what, refusal
        self.closed = False
        """Draining: nothing more is admitted."""
        self._seconds_each = 1.0

    @property
    def taken(self) -> int:
        """Places taken now."""
        return self.pool.used

    def check(self, tenant: Tenant, places: int = 1) -> None:
        """Raise TooManyRequests while there is no room, saying when there may be; ServiceUnavailable once closed."""
        self._check_open()
        if not self.pool.fits(TenantAllocation(tenant.name, tenant.weight), places, monotonic()):
            raise self._full(tenant, places)

    @contextmanager
    def held(
        self, tenant: Tenant, places: int = 1, end: Callable[[], None] | None = None
    ) -> Iterator[AdmissionSlot]:
        """Hold places while inside; raises as :meth:`check`. With `end` they may be taken back, by calling it."""
        self._check_open()
        holding = TenantAllocation(tenant.name, tenant.weight)
        if end is not None:
            holding.takeable, holding.revoke = lambda: True, end
        if not self.pool.take(holding, places, monotonic()):
            raise self._full(tenant, places)
        stay = AdmissionSlot()
        try:
            yield stay
        finally:
            self.pool.give_back(holding)
            if stay.seconds is not None:
                self._seconds_each += SMOOTHING * (stay.seconds / places - self._seconds_each)

    @asynccontextmanager
    async def lent(self, tenant: Tenant) -> AsyncIterator[None]:
        """Hold a place while inside. The refusal ends that where a tenant that has less needs the place."""
        async with revocable(lambda: self._full(tenant, 1)) as end:
            with self.held(tenant, end=end):
                yield

    def estimate_s(self, pictures: int, at_a_time: int) -> float:
        """Whole seconds, at least 1, until `pictures` should be done, `at_a_time` at once, as the latest edits took."""
        return float(max(1, math.ceil(self._seconds_each * pictures / at_a_time)))

    def _check_open(self) -> None:
        if self.closed:
            raise ServiceUnavailable("This gateway is shutting down.", retry_after_s=1)

    def _full(self, tenant: Tenant, places: int) -> Overloaded:
        limit, taken, own = self.pool.capacity, self.taken, self.pool.held(tenant.name)
        self.pool.outcomes[tenant.name, "refused"] += 1
        return self._refusal(
            received=f"{places} {self.what} while {taken} are in progress, {own} of them this tenant's",
            accepted=f"{limit} {self.what} at a time, shared by the tenants that ask",
            retry_after_s=self.estimate_s(max(1, taken + places - limit), limit),
        )


class ByteReservation:
    """Counts the bytes of one request as they come; TooManyRequests where its tenant has no room for more."""

    def __init__(self, pool: SharedPool, tenant: Tenant) -> None:
        self._pool, self.holding = pool, TenantAllocation(tenant.name, tenant.weight)

    def __call__(self, size_bytes: int) -> None:
        """Hold so many further bytes."""
        too_large = self.holding.amount + size_bytes > self._pool.capacity
        if too_large or not self._pool.take(self.holding, size_bytes, monotonic()):
            raise self._refusal()

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Receive from the client while inside. TooManyRequests ends it where a tenant with less needs the room."""
        async with revocable(self._refusal) as end:
            self.holding.takeable, self.holding.revoke = lambda: True, end
            try:
                yield
            finally:
                self.holding.takeable = firm

    def _refusal(self) -> Overloaded:
        self._pool.outcomes[self.holding.tenant, "refused"] += 1
        return TooManyRequests(
            "Too many pictures are being received; try again later.", retry_after_s=RETRY_AFTER_S
        )


class MemoryLimiter:
    """Counts bytes against a limit. The tenant that holds least gets its answer first, then the oldest answer.

    An answer older than the pool's grace may be cut off for a tenant that holds less.
    """

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._waiting: dict[TenantAllocation, tuple[int, asyncio.Future[None]]] = {}
        self._again: asyncio.TimerHandle | None = None

    @contextmanager
    def growing(self, tenant: Tenant) -> Iterator[ByteReservation]:
        """Hold what is counted, piece by piece as it arrives, while inside. It refuses and never waits."""
        grow = ByteReservation(self.pool, tenant)
        try:
            yield grow
        finally:
            self.pool.give_back(grow.holding)

    @asynccontextmanager
    async def room(
        self, tenant: Tenant, size_bytes: int, cut: Callable[[], None] | None = None
    ) -> AsyncIterator[None]:
        """Hold `size_bytes` while inside, once there is room; more than the limit fits when nothing else is held.

        ServiceUnavailable is raised where there is none within :data:`ROOM_S`. `cut` ends a slow reader's answer.
        """
        holding = TenantAllocation(tenant.name, tenant.weight)
        if cut is not None:
            holding.takeable, holding.revoke = lambda: True, cut
        turn = asyncio.get_running_loop().create_future()
        self._waiting[holding] = size_bytes, turn
        try:
            self._serve()
            try:
                async with asyncio.timeout(ROOM_S):
                    await turn
            except TimeoutError as error:
                self.pool.outcomes[tenant.name, "refused"] += 1
                raise ServiceUnavailable(
                    "Too many answers are being read; fetch the pictures later.", retry_after_s=RETRY_AFTER_S
                ) from error
            yield
        finally:
            self._waiting.pop(holding, None)
            self.pool.give_back(holding)
            self._serve()

    def _serve(self) -> None:
        """Let waiting answers in. One without room keeps later ones out: small ones never starve a large one."""
        if self._again is not None:
            self._again.cancel()
            self._again = None
        while (first := self._next()) is not None:
            _, turn = self._waiting.pop(first)
            if not turn.done():  # its request ends otherwise, and gives the room back
                turn.set_result(None)
        if self._waiting and self.pool.grace_s:
            self._again = asyncio.get_running_loop().call_later(self.pool.grace_s, self._serve)

    def _next(self) -> TenantAllocation | None:
        heads: dict[str, TenantAllocation] = {}
        for one in self._waiting:
            heads.setdefault(one.tenant, one)
        for one in sorted(heads.values(), key=lambda one: self.pool.held(one.tenant) / one.weight):
            size_bytes, _ = self._waiting[one]
            if self.pool.take(one, size_bytes, monotonic()):
                return one
            if size_bytes > self.pool.capacity - self.pool.used:
                return None
        return None


# Limits of each tenant at this gateway: pictures in progress, and pictures in a minute.
#
# The minute is a token bucket by GCRA: it is full with a minute's pictures, an edit takes as many tokens as
# it has pictures, and a token comes back every 60 s / limit. Unlike a window it needs one number per
# tenant, and knows to the moment when an edit of n pictures fits again, which is what Retry-After says. The
# price: after a quiet minute a tenant may spend the full bucket and what flows in meanwhile, up to twice
# its limit in 60 s; over time the limit holds.
#
# Each gateway counts for itself, from its start.


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
        """Return whether the entry is counted."""
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
