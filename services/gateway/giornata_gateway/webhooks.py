"""Webhooks of all gateways: kept before their job is submitted, signed, and sent when it has ended."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import ipaddress
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import nats.errors
import structlog

from giornata import __version__
from giornata.bus.bus import Bus
from giornata.deadlines import retry_patiently
from giornata.records import WebhookRecords
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InternalError,
    InvalidField,
    JobNotFound,
    ServiceUnavailable,
    WebhookLimit,
    WebhookNotFound,
)
from giornata.wire.messages import DoneEvent, EventKind
from giornata.wire.templates import WebhookRecord, WebhookState
from giornata_gateway.config import GatewayConfig, Network, networks_in
from giornata_gateway.jobs.submission import JobLedger
from giornata_gateway.views.resources import webhook_body

# Addresses that this gateway may connect to, since a request names them.


Address = ipaddress.IPv4Address | ipaddress.IPv6Address

MAX_URL: Final = 2000
WEBHOOK: Final = "webhook"
NOT_SENT: Final = "A webhook cannot be sent there."
_TRANSLATED: Final = ipaddress.ip_network("64:ff9b::/96")
"""NAT64: the last 32 bits are an IPv4 address."""
_UNICAST: Final = ipaddress.ip_network("2000::/3")
"""All of IPv6 that is given out as public. What lies beside it may carry an IPv4 address, or be a site's own."""
_ASSIGNED: Final = ipaddress.ip_network("192.0.0.0/24")
"""For protocols; Python takes part of it for public."""
PORTS: Final = {"https": 443, "http": 80}


def names_of(url: str) -> set[str]:
    """Return what :func:`hosts_in` may call the host of `url`: HOST:PORT, and at its scheme's own port HOST."""
    try:
        parts = urlsplit(url)
        usual, name = PORTS.get(parts.scheme), parts.hostname or ""
        port = parts.port or usual
    except ValueError:
        return set()
    name = f"[{name}]" if ":" in name else name
    return {f"{name}:{port}", name} if port == usual else {f"{name}:{port}"}


def check_url(url: str, networks: Sequence[Network], field: str = WEBHOOK, why: str = NOT_SENT) -> str:
    """`url` if it may be connected to, as far as its text tells; InvalidField otherwise.

    Plain HTTP is for the networks that the operator allows. Addresses of names are looked at when a connection is made.
    """
    within = ", or http:// within the networks that are allowed" if networks else ""
    accepted = f"https://HOST/PATH at a public address{within}"
    refusal = InvalidField(why, field=field, received=url, accepted=accepted)
    plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= MAX_URL
    if not plain:
        raise refusal
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise refusal from None
    schemes = {"https", "http"} if networks else {"https"}
    if parts.scheme not in schemes or not host or port == 0 or "@" in parts.netloc or parts.fragment:
        raise refusal
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return url
    if not may_connect(literal, networks, plain=parts.scheme == "http"):
        raise refusal
    return url


def may_connect(address: Address, networks: Sequence[Network], *, plain: bool) -> bool:
    """Return whether `address` may be connected to: within `networks`, or, unless it is `plain` HTTP, a public one."""
    inner = _inner(address)
    if any(one.version == inner.version and inner in one for one in networks):
        return True
    if plain:
        return False
    if isinstance(inner, ipaddress.IPv4Address):
        return inner.is_global and not inner.is_multicast and inner not in _ASSIGNED
    return inner.is_global and inner in _UNICAST


def _inner(address: Address) -> Address:
    """The IPv4 address that an IPv6 address stands for, where it does."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address in _TRANSLATED:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


# Signatures of webhooks as Standard Webhooks has them (standardwebhooks.com, version 1.0.0).


PREFIX: Final = "whsec_"
LEAST_BYTES: Final = 24
"""Least length of the secret from which all tenants' secrets are made."""


def secret_of(master: bytes, tenant: str) -> str:
    """The secret of a tenant, as its receivers are told it; no secret gives another one away."""
    derived = hmac.digest(master, b"giornata webhook\0" + tenant.encode(), hashlib.sha256)
    return PREFIX + base64.b64encode(derived).decode()


def headers(secrets: Sequence[str], message_id: str, timestamp_s: int, body: str) -> dict[str, str]:
    """The headers of an attempt, with a signature by each secret: receivers accept any that they know."""
    signed = f"{message_id}.{timestamp_s}.{body}".encode()
    keys = (base64.b64decode(secret.removeprefix(PREFIX)) for secret in secrets)
    signatures = (hmac.digest(key, signed, hashlib.sha256) for key in keys)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(one).decode()}" for one in signatures),
    }


FACTOR: Final = 4.0
LONGEST_S: Final = 6 * 3600.0
AT_ONCE: Final = 32
"""Webhooks that a gateway sends at a time."""
AT_ONCE_OF_TENANT: Final = 4
"""Webhooks of one tenant among them, so that its slow receivers hold up no other tenant's."""
CLAIM_S: Final = 60.0
"""For so long a webhook belongs to the gateway that sends it, longer than an attempt may take."""
GONE: Final = 410
"""The status by which a receiver wants no more of it."""
ERROR_CHARACTERS: Final = 200


class DeliveryOutcome(StrEnum):
    """The outcome of an attempt to deliver a webhook."""

    TAKEN = "taken"
    FAILED = "failed"
    """It is sent again."""
    GIVEN_UP = "given_up"


def pause_s(first_s: float, attempts: int) -> float:
    """The pause after so many attempts: `first_s` after the first, then four times as long, six hours at most."""
    return min(LONGEST_S, first_s * FACTOR ** min(attempts - 1, 20))


def claimed(hook: WebhookRecord, body: str | None, now_s: float) -> WebhookRecord | None:
    """The record while a gateway sends it; None where it is not to be sent now: another one does, or has."""
    if hook.state is not WebhookState.WAITING or hook.next_s > now_s:
        return None
    return hook.model_copy(update={"body": hook.body or body, "next_s": now_s + CLAIM_S})


def failed(
    hook: WebhookRecord, why: str, status: int | None, now_s: float, *, most: int, first_s: float
) -> WebhookRecord:
    """The record after an attempt failed, of at most so many, with its receiver's answer `status` if there was one."""
    attempts = hook.attempts + 1
    over = attempts >= most or status == GONE
    state = WebhookState.DEAD if over else WebhookState.WAITING
    next_s = now_s + pause_s(first_s, attempts)
    told = {"attempts": attempts, "error": why[:ERROR_CHARACTERS], "state": state, "next_s": next_s}
    return hook.model_copy(update=told)


def revived(hook: WebhookRecord) -> WebhookRecord:
    """The record of a webhook that is sent again, as often as a new one."""
    return hook.model_copy(update={"state": WebhookState.WAITING, "attempts": 0, "next_s": 0.0})


def chosen(
    hooks: Mapping[str, WebhookRecord], looks_s: Mapping[str, float], busy: Collection[str], now_s: float
) -> tuple[list[str], float | None]:
    """Return which of `hooks`, by key, are sent now, and the time at which the next one is due.

    `looks_s` says before when a job that has not ended is not looked at. `busy` are being sent.
    """
    due: list[tuple[float, str]] = []
    next_s = None
    for key, hook in hooks.items():
        if hook.state is WebhookState.WAITING and key not in busy:
            at_s = max(hook.next_s, looks_s.get(key, 0.0))
            if at_s <= now_s:
                due.append((at_s, key))
            elif next_s is None or at_s < next_s:
                next_s = at_s
    tenants = Counter(hooks[key].tenant for key in busy if key in hooks)
    found: list[str] = []
    for _, key in sorted(due):
        tenant = hooks[key].tenant
        if len(busy) + len(found) < AT_ONCE and tenants[tenant] < AT_ONCE_OF_TENANT:
            found.append(key)
            tenants[tenant] += 1
    return found, next_s


def read_secrets(path: Path | None) -> tuple[bytes, ...]:
    """The secrets in a file, one a line, the present one first; none without a file.

    ServiceUnavailable, which quotes nothing, where it cannot be read, or one is too short.
    """
    if path is None:
        return ()
    try:
        secrets = tuple(line.strip() for line in path.read_bytes().splitlines() if line.strip())
    except OSError as error:
        raise ServiceUnavailable(
            f"The secret of webhooks cannot be read from {path}: {error.strerror}."
        ) from None
    if not secrets or min(map(len, secrets)) < LEAST_BYTES:
        raise ServiceUnavailable(
            f"The secret of webhooks in {path} is missing or too short.",
            accepted=f"a line of {LEAST_BYTES} characters or more, such as `openssl rand -base64 32` prints",
        )
    return secrets


ATTEMPT_S: Final = 15.0
"""From the look-up of a host to the last byte of its answer; Standard Webhooks recommends 15 to 30 s."""
AGENT: Final = {"User-Agent": f"Giornata/{__version__}"}
TYPE: Final = {"Content-Type": "application/json"}


class AddressRefusedError(OSError):
    """This address may not be connected to."""


async def send(
    networks: Sequence[Network], url: str, headers: Mapping[str, str], body: str
) -> tuple[int | None, str]:
    """One attempt: the status of the answer, of which no more is read, and what to tell of it; none where none came.

    It goes to public addresses over HTTPS, and to `networks` over either scheme. The name is resolved for the attempt,
    and each address is looked at as its socket is made: there is no second look-up by which another address could come
    (DNS rebinding). No redirect is followed, and no proxy asked.
    """
    try:
        async with (
            guarded_session(networks, plain=urlsplit(url).scheme == "http") as http,
            http.post(
                url, data=body.encode(), headers={**TYPE, **headers}, allow_redirects=False
            ) as response,
        ):
            return response.status, f"status {response.status}"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        return None, told(error)


def told(error: Exception) -> str:
    """Return what to tell of an attempt without an answer: nothing of the addresses that a name leads to."""
    if isinstance(error, aiohttp.ClientConnectorError):
        refused = isinstance(error.os_error, AddressRefusedError)
        return "the address is not allowed" if refused else "no connection"
    return f"no answer in {ATTEMPT_S:g} s" if isinstance(error, TimeoutError) else type(error).__name__


def guarded_session(networks: Sequence[Network], *, plain: bool) -> aiohttp.ClientSession:
    """Connects to public addresses and to `networks` alone, or, for `plain` HTTP, to `networks` alone.

    It looks at each address as its socket is made, and asks no proxy.
    """
    connector = aiohttp.TCPConnector(
        force_close=True,
        use_dns_cache=False,
        socket_factory=partial(_socket, networks, plain=plain),
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=ATTEMPT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=AGENT,
        trust_env=False,
    )


def _socket(networks: Sequence[Network], address: tuple[Any, ...], *, plain: bool) -> socket.socket:
    """A socket for one address of :func:`socket.getaddrinfo`; AddressRefusedError where it may not be connected to."""
    family, kind, protocol, _, place = address
    if not may_connect(ipaddress.ip_address(str(place[0]).partition("%")[0]), networks, plain=plain):
        raise AddressRefusedError(f"{place[0]} may not be connected to")
    return socket.socket(family, kind, protocol)


# Webhooks of all gateways: kept before their job is submitted, sent when it has ended, forgotten when they
# are taken.
#
# A webhook is a record in a bucket, which every gateway follows. The one that claims it first sends it. So
# a webhook outlives the gateway that took its job.


log = structlog.get_logger(__name__)

LOOK_S = 30.0
"""How often a job is looked at whose end was not heard."""
UNKNOWN_S = 120
"""How long a webhook is kept whose job there is not: it was not accepted, or its record has ended."""
MAX_OF_TENANT = 1000
DOUBTFUL = (ServiceUnavailable, DeadlineExceeded, InternalError)
"""Errors of a submission after which its job may run nevertheless."""


class WebhookService:
    """The webhooks of all tenants. :meth:`sending` sends them."""

    def __init__(
        self,
        config: GatewayConfig,
        bus: Bus,
        records: WebhookRecords,
        jobs: JobLedger,
        count: Callable[[DeliveryOutcome], None],
    ) -> None:
        self._config, self._bus, self._records, self._jobs, self._count = config, bus, records, jobs, count
        self._masters = read_secrets(config.webhook_secret_file)
        self._networks = networks_in(config.webhook_networks)
        self._hooks: dict[str, WebhookRecord] = {}
        self._keys: dict[str, str] = {}
        """By job."""
        self._looks_s: dict[str, float] = {}
        """Before when a job whose end was not heard is not looked at again, by key."""
        self._busy: set[str] = set()
        self._news = asyncio.Event()

    def secret(self, tenant: str) -> str:
        """The secret with which a tenant's webhooks are signed; InvalidField where the gateway has none."""
        return self._secrets(tenant)[0]

    def _secrets(self, tenant: str) -> list[str]:
        if not self._masters:
            raise InvalidField(
                "This gateway sends no webhooks.",
                field=WEBHOOK,
                accepted="no webhook; operators name GIORNATA_WEBHOOK_SECRET_FILE to allow them",
            )
        return [secret_of(master, tenant) for master in self._masters]

    @asynccontextmanager
    async def promised(self, tenant: str, job_id: str, url: str | None) -> AsyncIterator[None]:
        """Keep the webhook of a job while it is submitted inside; one whose job is refused is forgotten.

        Where nobody can say whether the job was accepted it is kept: a repeated request would not bring it again. One
        without a job is forgotten later.

        Raises:
            InvalidField: webhooks are not sent at all, or not there.
            WebhookLimit: the tenant has as many as it may have.
        """
        if url is None:
            yield
            return
        self._secrets(tenant)
        check_url(url, self._networks)
        own = await self.of(tenant)
        if len(own) >= MAX_OF_TENANT:
            raise WebhookLimit(received=f"{len(own) + 1} webhooks", accepted=f"at most {MAX_OF_TENANT}")
        hook = WebhookRecord(job_id=job_id, tenant=tenant, url=url, created_s=int(time.time()))
        known = not await self._records.create(hook)  # a repeated request
        try:
            yield
        except GiornataError as error:
            if not known and not isinstance(error, DOUBTFUL):
                await self._records.delete(hook)
            raise

    async def of(self, tenant: str) -> list[WebhookRecord]:
        """A tenant's webhooks that were not taken yet, the newest first."""
        return await self._records.all_of(tenant)

    def kept(self, state: WebhookState) -> int:
        """Return how many webhooks of all tenants are in a state, as this gateway has heard; 0 where it sends none."""
        return sum(hook.state is state for hook in self._hooks.values())

    async def again(self, tenant: str, job_id: str) -> WebhookRecord:
        """Send a webhook that was given up again; WebhookNotFound without it."""
        return await self._records.change(
            tenant,
            job_id,
            lambda hook: revived(hook) if hook.state is WebhookState.DEAD else None,
        )

    async def delete(self, tenant: str, job_id: str) -> None:
        """Send it no more; WebhookNotFound without it."""
        await self._records.delete(await self._records.get(tenant, job_id))

    @asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        """Send webhooks while inside; what is being sent on leaving is sent again by the next gateway."""
        if not self._masters:
            yield
            return
        done = subjects.events_of_kind(EventKind.DONE)
        follow = retry_patiently((nats.errors.Error, GiornataError))  # what fails is begun again
        async with (
            self._bus.listen(done, DoneEvent, self._hear),
            asyncio.TaskGroup() as tasks,
        ):
            running = [
                tasks.create_task(follow(self._follow_changes), name="webhooks-follow"),
                tasks.create_task(self._send_all(), name="webhooks-send"),
            ]
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    def _hear(self, event: DoneEvent) -> None:
        """A job has ended: look at it now."""
        key = self._keys.get(event.job_id)
        if key is not None:
            self._looks_s.pop(key, None)
            self._news.set()

    async def _follow_changes(self) -> None:
        """Know all webhooks, for ever."""
        self._hooks.clear()
        async for key, hook in self._records.bucket.changes(">"):
            if hook is None:
                self._forgotten(key)
            else:
                self._hooks[key] = hook
                self._keys[hook.job_id] = key
            self._news.set()

    def _forgotten(self, key: str) -> None:
        self._looks_s.pop(key, None)
        hook = self._hooks.pop(key, None)
        if hook is not None:
            self._keys.pop(hook.job_id, None)

    async def _send_all(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                now_s = time.time()
                found, next_s = chosen(self._hooks, self._looks_s, self._busy, now_s)
                for key in found:
                    self._busy.add(key)
                    # with the record: it may be forgotten before the task begins
                    tasks.create_task(self._attend(self._hooks[key], key), name=f"webhook-{key}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(None if next_s is None else next_s - now_s):
                        await self._news.wait()

    async def _attend(self, hook: WebhookRecord, key: str) -> None:
        try:
            await self._attempt(hook, key)
        except WebhookNotFound:  # its tenant has forgotten it
            self._forgotten(key)
        except (GiornataError, nats.errors.Error) as error:  # a store that is away: looked at again
            self._looks_s[key] = time.time() + self._config.webhook_retry_s
            log.info("webhook_waits", job=hook.job_id, error=str(error))
        except Exception:  # the task's edge: logged; the others go on
            self._looks_s[key] = time.time() + LOOK_S
            log.exception("webhook_failed", job=hook.job_id)
        finally:
            self._busy.discard(key)
            self._news.set()

    async def _attempt(self, hook: WebhookRecord, key: str) -> None:
        body = hook.body
        if body is None:
            # before the look: an end that is heard meanwhile undoes it
            self._looks_s[key] = time.time() + LOOK_S
            body = await self._told(hook)
            if body is None:
                return
            self._looks_s.pop(key, None)
        won = False

        def claim(present: WebhookRecord) -> WebhookRecord | None:
            nonlocal won
            taken = claimed(present, body, time.time())
            won = taken is not None
            return taken

        hook = await self._records.change(hook.tenant, hook.job_id, claim)
        self._hooks[key] = hook
        if not won or hook.body is None:
            return
        signed = headers(self._secrets(hook.tenant), f"msg_{hook.job_id}", int(time.time()), hook.body)
        status, why = await send(self._networks, hook.url, signed, hook.body)
        if status is not None and 200 <= status < 300:
            await self._records.delete(hook)
            self._forgotten(key)
            self._count(DeliveryOutcome.TAKEN)
            log.info("webhook_taken", job=hook.job_id, attempts=hook.attempts + 1)
            return
        now_s, most = time.time(), self._config.webhook_attempts
        first_s = self._config.webhook_retry_s
        hook = self._hooks[key] = await self._records.change(
            hook.tenant,
            hook.job_id,
            lambda present: failed(present, why, status, now_s, most=most, first_s=first_s),
        )
        over = hook.state is WebhookState.DEAD
        self._count(DeliveryOutcome.GIVEN_UP if over else DeliveryOutcome.FAILED)
        log.info("webhook_not_taken", tenant=hook.tenant, job=hook.job_id, why=why, attempts=hook.attempts)

    async def _told(self, hook: WebhookRecord) -> str | None:
        """Return what is told of the webhook's job; None while it has not ended, or is not known."""
        try:
            record = await self._jobs.get(hook.job_id)
        except JobNotFound:
            if hook.created_s + UNKNOWN_S < time.time():
                await self._records.delete(hook)
            return None
        if record.job.tenant != hook.tenant or not record.state.terminal:
            return None
        return webhook_body(record, self._config.public_url)
