"""A connection of nats-py and its subscriptions, in order; no caller waits for an answer that cannot come.

The server refuses a message or subscription by an asynchronous error that names the subject. The library's `request`
would wait for its time limit all the same, and a subscription would stay silent for ever. An answer is lost, too, when
the server of the connection dies. And where an answer and a cancellation come at once, the library goes on as if its
caller had not been cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import nats.errors
import structlog
from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.errors import (
    BadRequestError,
    KeyNotFoundError,
    NoStreamResponseError,
    NotFoundError,
    ServiceUnavailableError,
)

from giornata.deadlines import heeding_cancel, retry, retry_until_led
from giornata.fleet import ListeningClock
from giornata.wire.errors import NotPermitted, ServiceUnavailable
from giornata.wire.subjects import NatsRole, inbox, user_in

log = structlog.get_logger(__name__)

T = TypeVar("T")

_REFUSAL: Final = re.compile(
    r'permissions violation for (?P<act>publish|subscription) to "(?P<subject>[^"]+)"'
)
"""The error of nats-py, which writes all of it in lower case, the subject too."""
_PING: Final = "PING"
"""Stands for a subject among the requests whose answers are lost with the connection; subjects are in lower case."""

MAX_HEADER_BYTES: Final = 16 << 10
"""Largest block of a message's headers that is read; ours have a few hundred bytes."""
OVERSIZED: Final = "Giornata-Oversized"
"""The only header of a message whose own are larger: the library would read them line by line."""

NO_SERVER: Final = "No NATS server answers; is GIORNATA_NATS_URL right?"
LOCKED_OUT: Final = (
    "The NATS server does not let us in; are user and password right, in GIORNATA_NATS_URL or in the file that "
    "GIORNATA_NATS_PASSWORD_FILE names?"
)


class RefusedError(nats.errors.Error):
    """The server does not let this user use a subject."""


class LostError(nats.errors.Error):
    """The connection was lost before the answer; the other side may have acted."""


class FailFastNatsClient(Client):
    """A client whose requests fail when refused, or when the connection is lost. Make it with :func:`open_client`."""

    def __init__(self) -> None:
        super().__init__()
        self.on_reconnect: list[Callable[[], None]] = []
        """Called when a lost connection is back."""
        self.losses = 0
        """How often the connection was lost: what was published just before may have gone under with it."""
        self.locked_out = False
        """A server did not accept user and password."""
        self._refused_subscriptions: set[str] = set()
        self._asked: defaultdict[str, set[asyncio.Future[Any]]] = defaultdict(set)
        """Futures of the answers to requests, by subject in lower case."""

    async def _process_headers(self, headers: bytes | None) -> dict[str, str] | None:
        size_bytes = len(headers or b"")
        if size_bytes > MAX_HEADER_BYTES:
            return {OVERSIZED: f"{size_bytes} bytes"}
        return await super()._process_headers(headers)

    async def hear(self, error: Exception) -> None:
        """The error callback: log, and fail the requests that were refused."""
        found = _REFUSAL.search(str(error))
        if found is None:
            if "authorization violation" in str(error).lower():
                self.locked_out = True
            log.warning("nats_error", error=repr(error))
            return
        act, subject = found["act"], found["subject"]
        log.error("nats_refused", act=act, subject=subject)
        if act == "subscription":
            self._refused_subscriptions.add(subject)
        else:
            _fail(self._asked.pop(subject, ()), RefusedError(f"nats: no right for {act} to {subject}"))

    async def hear_return(self) -> None:
        """Reconnection callback: the connection is back."""
        log.info("nats_reconnected")
        for callback in self.on_reconnect:
            callback()

    async def hear_loss(self) -> None:
        """Disconnection callback: fail all requests, since their answers may be lost with the connection."""
        self.losses += 1
        if not (self.is_closed or self.is_draining):
            log.warning("nats_disconnected")
        for futures in list(self._asked.values()):
            _fail(futures, LostError())

    async def in_force(self, *subscribed: str) -> None:
        """Return when the server has taken the subscriptions; NotPermitted if it has refused one."""
        await barrier(self)
        for subject in subscribed:
            if subject.lower() in self._refused_subscriptions:
                raise NotPermitted(received=subject)

    async def request(
        self,
        subject: str,
        payload: bytes = b"",
        timeout: float = 0.5,  # noqa: ASYNC109 - the library's signature, as below
        old_style: bool = False,  # noqa: FBT001, FBT002
        headers: dict[str, Any] | None = None,
    ) -> Msg:
        """Ask, and wait for the answer; JetStream's calls come here, too."""
        with heeding_cancel():
            return await super().request(subject, payload, timeout, old_style, headers)

    async def _connect_to_server(self, s: Any) -> None:
        """Open the socket, and close that of an attempt before, which the library would leave open.

        Its attempts would go on for ever if one is refused as they are cancelled.
        """
        if self._transport is not None:
            self._transport.close()  # type: ignore[no-untyped-call]  # nats-py annotates it in part
        with heeding_cancel():
            await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        with heeding_cancel():
            await super()._process_connect_init()

    async def flush(self, timeout: int = DEFAULT_FLUSH_TIMEOUT) -> None:  # noqa: ASYNC109
        """Return when the server has answered a PING."""
        with heeding_cancel():
            await super().flush(timeout)

    async def publish(
        self, subject: str, payload: bytes = b"", reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Publish, and remember the future of a request until it is done."""
        future = self._resp_map.get(reply.rpartition(".")[2]) if reply else None
        if future is not None:
            key = subject.lower()
            self._asked[key].add(future)
            future.add_done_callback(lambda done: self._forget(key, done))
        with heeding_cancel():
            await super().publish(subject, payload, reply, headers)

    async def received(self) -> None:
        """Return when all that the server had for us at the call is received, handled or not.

        Raises:
            LostError: the connection is lost.
        """
        if not self.is_connected:
            raise LostError
        pong: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._asked[_PING].add(pong)
        pong.add_done_callback(lambda done: self._forget(_PING, done))
        await self._send_ping(pong)
        await asyncio.shield(pong)  # the library sets it though its waiter was cancelled

    async def _process_pong(self) -> None:
        """Take in a PONG. Where its asker has gone, the library would take its own error for a broken connection."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    def _forget(self, key: str, future: asyncio.Future[Any]) -> None:
        self._asked[key].discard(future)
        if not self._asked[key]:
            del self._asked[key]


def _fail(futures: Iterable[asyncio.Future[Any]], error: nats.errors.Error) -> None:
    for future in list(futures):
        if not future.done():
            future.set_exception(error)


@asynccontextmanager
async def open_client(
    url: str, name: str, user: str, password_file: Path | None, timeout_s: float
) -> AsyncIterator[FailFastNatsClient]:
    """A client that reconnects for ever while it is up and drains on leaving; see :func:`giornata.bus.bus.connect`."""
    password = await _read(password_file) if password_file else None
    if user == NatsRole.APPLICATION:
        user = user_in(url)
    client = FailFastNatsClient()
    try:
        try:
            async with asyncio.timeout(timeout_s):
                await client.connect(
                    servers=[part.strip() for part in url.split(",")],
                    name=name,
                    user=None if password is None else str(user),
                    password=password,
                    inbox_prefix=inbox(user),
                    allow_reconnect=True,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=1,
                    reconnected_cb=client.hear_return,
                    disconnected_cb=client.hear_loss,
                    error_cb=client.hear,
                )
        except (OSError, TimeoutError, nats.errors.Error) as error:
            raise ServiceUnavailable(LOCKED_OUT if client.locked_out else NO_SERVER) from error
        yield client
    finally:
        await _leave(client)


async def _read(password_file: Path) -> str:
    try:
        return (await asyncio.to_thread(password_file.read_text, encoding="utf-8")).strip()
    except OSError as error:
        raise ServiceUnavailable(
            f"The NATS password cannot be read: {error.strerror}. Is GIORNATA_NATS_PASSWORD_FILE right?"
        ) from error


async def _leave(client: Client) -> None:
    """Drain the connection if there is one; close it in any case."""
    try:
        if client.is_connected:
            await client.drain()
    except nats.errors.Error as error:  # it was lost on the way
        log.warning("not_drained", error=repr(error))
    finally:
        if not client.is_connected:  # close() would write to the broken socket, fail and stop half-way
            client._pending, client._pending_data_size = [], 0  # noqa: SLF001 - nats-py has no other way
        await client.close()


@asynccontextmanager
async def drained_tasks() -> AsyncIterator[tuple[asyncio.TaskGroup, AsyncExitStack]]:
    """A task group that outlives the subscriptions that feed it: they are drained, then the tasks awaited."""
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        yield tasks, stack


async def barrier(client: Client) -> None:
    """Return when the server has processed every command given before: subscriptions are in force, or gone.

    The client's own `flush` writes its PING at once, ahead of commands that its flusher task has yet to write; before
    the second PING they are written.
    """
    await client.flush()
    await client.flush()


async def drain(client: Client, subscription: Subscription) -> None:
    """Take in the delivered messages and no others; without a connection there are none to wait for."""
    try:
        if client.is_connected:
            # The library's drain would believe its overtaking flush, and drop what arrives in between.
            await client._send_unsubscribe(subscription._id)  # noqa: SLF001 - `unsubscribe` would drop what was delivered
            await barrier(client)
            await subscription.drain()  # type: ignore[no-untyped-call]  # nats-py annotates it in part
        else:
            await subscription.unsubscribe()
    except nats.errors.Error as error:
        log.warning("subscription_not_drained", subject=subscription.subject, error=repr(error))


async def drain_service(client: Client, service: Any) -> None:
    """Take in the delivered requests of a micro service and end it; `Service.stop` alone would drop these."""
    endpoints: Sequence[Any] = service._endpoints  # noqa: SLF001 - nats.micro has no drain
    await asyncio.gather(*(drain(client, endpoint._subscription) for endpoint in endpoints))  # noqa: SLF001 - as above
    service._endpoints = []  # noqa: SLF001 - so that stop() does not unsubscribe them again
    with contextlib.suppress(nats.errors.Error):  # a closed connection has no service
        await service.stop()


LOOK_S: Final = 0.25
"""How often silence is looked for; a timer, since silence raises no event."""


class TrackedSubscription:
    """A subscription whose messages are handled one after another; :meth:`giornata.bus.bus.Bus.listen` makes it."""

    def __init__(self, client: FailFastNatsClient) -> None:
        self._client = client
        self.subscription: Subscription | None = None
        """None until it is made."""
        self._handled = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def handled(self) -> None:
        """One more message has been handled."""
        self._handled += 1
        for target, future in self._waiting:
            if target <= self._handled and not future.done():
                future.set_result(None)

    async def caught_up(self) -> None:
        """Return when every message that had reached the server before the call is handled, later ones or not.

        Raises:
            LostError: the connection is lost.
        """
        await self._client.received()
        target = self._handled + (self.subscription.pending_msgs if self.subscription else 0)
        if target == self._handled:
            return
        entry = target, asyncio.get_running_loop().create_future()
        self._waiting.append(entry)
        try:
            await entry[1]
        finally:
            self._waiting.remove(entry)


async def keep_looking(
    listening: TrackedSubscription, clock: ListeningClock, look: Callable[[], None]
) -> None:
    """For ever, tick `clock` when all that came before is handled, and then `look`.

    A process that lags ticks as much later, so that it looks at what it knew at that time. A backlog that never empties
    holds up no tick: a tick waits for earlier messages only. Time without a connection does not count.
    """
    while True:
        await asyncio.sleep(LOOK_S)
        now = time.monotonic()
        try:
            await listening.caught_up()
        except nats.errors.Error:
            clock.pause()
        else:
            clock.tick(now)
        look()


# What JetStream is asked, again while a cluster of its servers has no leader.


COMING_UP_S: Final = 30.0
"""How long we wait for a cluster of NATS servers that comes up."""
LEADERLESS_S: Final = 15.0
"""How long we wait for a cluster that chooses a leader; Raft waits four to nine seconds before it replaces one."""
_NO_SUITABLE_PEERS: Final = 10005
"""JetStream's error code: fewer servers are up than replicas are asked for."""
_NOT_TAKEN: Final = (NoStreamResponseError, KeyNotFoundError)


async def ask_jetstream(ask: Callable[[], Awaitable[T]], limit_s: float = LEADERLESS_S) -> T:
    """The answer of JetStream to a question that may be asked twice: a read, or the creation of what may exist."""
    return await retry(partial(retry_until_led, _has_no_leader, limit_s), ask)


async def read_just_made(read: Callable[[], Awaitable[T]]) -> T:
    """The answer to a read of a stream or bucket that was made a moment ago, by whomever.

    A cluster of servers says that it exists as soon as it is agreed upon; a server that has not applied it says that
    there is none.
    """

    def may_not_be_applied(error: BaseException) -> bool:
        return isinstance(error, NotFoundError) or _has_no_leader(error)

    return await retry(partial(retry_until_led, may_not_be_applied, COMING_UP_S), read)


async def write_to_jetstream(write: Callable[[], Awaitable[T]]) -> T:
    """The answer of JetStream to a write, which is tried again only if it was surely not taken.

    After a TimeoutError or LostError it may have been taken. A creation meets KeyNotFoundError where another writer was
    faster, and a cluster of servers has taken that record but not applied it: nobody can read it yet.
    """
    return await retry(
        partial(retry_until_led, lambda error: isinstance(error, _NOT_TAKEN), LEADERLESS_S), write
    )


def error_code(error: BaseException) -> int | None:
    """JetStream's code of an error. An error that the client makes has none, nor even the attribute."""
    return getattr(error, "err_code", None)


def _has_no_leader(error: BaseException) -> bool:
    if isinstance(error, BadRequestError):
        return error_code(error) == _NO_SUITABLE_PEERS
    return isinstance(error, (ServiceUnavailableError, nats.errors.TimeoutError, LostError))
