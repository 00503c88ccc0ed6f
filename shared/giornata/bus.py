"""The NATS edge: connect and drain, call with the remaining time, answer with mapped errors, publish, subscribe.

Traps of the client library that this file keeps from everybody else: a subscription runs its callback serially (so
handlers run as tasks of a group), a micro service's `stop` drops requests that were already delivered (so its
subscriptions are drained first), leaving a connection's context does not drain it, `request` waits half a second unless
told otherwise, a payload above the server's limit closes the connection, and `flush` overtakes commands that are still
to be written (:func:`barrier` does not).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import nats
import nats.errors
import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.micro import add_service
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from nats.micro.request import Request as MicroRequest
from nats.micro.service import Service
from nats.micro.service import ServiceConfig as MicroConfig
from pydantic import BaseModel

from giornata import __version__, codec
from giornata.deadlines import Deadline
from giornata.errors import (
    DeadlineExceeded,
    ErrorBody,
    GiornataError,
    InternalError,
    MalformedMessage,
    PayloadTooLarge,
    SchemaMismatch,
    ServiceUnavailable,
    from_body,
)

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Endpoint:
    """A subject, the type of its requests, and the coroutine that answers one."""

    subject: str
    kind: type[BaseModel]
    handler: Callable[[Any], Awaitable[BaseModel]]
    limit_bytes: int = codec.MAX_CONTROL_BYTES


class Bus:
    """One NATS connection. Make it with :func:`connect`."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.jetstream: JetStreamContext = client.jetstream()
        self.on_reconnect: list[Callable[[], None]] = []
        """Called after the connection was lost and is back: core messages of the meantime are gone."""

    async def publish(self, subject: str, message: BaseModel) -> None:
        """Tell whoever listens; nothing is awaited but the socket's buffer."""
        await self.client.publish(subject, codec.encode(message))

    async def call(
        self,
        subject: str,
        request: BaseModel,
        reply: type[M],
        deadline: Deadline,
        *,
        limit_bytes: int = codec.MAX_CONTROL_BYTES,
    ) -> M:
        """Ask and wait for the answer until `deadline`.

        Raises:
            ServiceUnavailable: nobody listens on the subject, or there is no connection.
            PayloadTooLarge: the request is larger than `limit_bytes` or than the server accepts.
            DeadlineExceeded: no answer in time.
            GiornataError: what the other side raised, as the same class.
        """
        deadline.check()
        data = codec.encode(request, limit_bytes=limit_bytes)
        try:
            message = await self.client.request(subject, data, timeout=deadline.remaining_s())
        except nats.errors.NoRespondersError as error:
            raise ServiceUnavailable(f"No service answers on {subject}.", retry_after_s=1) from error
        except nats.errors.TimeoutError as error:
            raise DeadlineExceeded(f"No answer on {subject} in time.") from error
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge("The request is larger than the NATS server accepts.") from error
        except nats.errors.Error as error:
            raise ServiceUnavailable("There is no connection to NATS.", retry_after_s=1) from error
        if message.headers and ERROR_CODE_HEADER in message.headers:
            raise from_body(codec.decode(ErrorBody, message.data))
        return codec.decode(reply, message.data)

    @asynccontextmanager
    async def answer(self, *endpoints: Endpoint) -> AsyncIterator[None]:
        """Answer requests on plain subjects that have one owner; on leaving, finish those that were delivered."""
        async with _drained_tasks() as (tasks, stack):
            for endpoint in endpoints:
                subscription = await self.client.subscribe(endpoint.subject, cb=_spawning(tasks, endpoint))
                stack.push_async_callback(_drain, self.client, subscription)
            await barrier(self.client)
            yield

    @asynccontextmanager
    async def serve(self, name: str, *endpoints: Endpoint, instance: str) -> AsyncIterator[None]:
        """Answer requests as one instance of a micro service, in a queue group, visible to ``nats micro ls``."""
        config = MicroConfig(name=f"giornata-{name}", version=__version__, metadata={"instance": instance})
        async with _drained_tasks() as (tasks, stack):
            service = await add_service(self.client, config)
            stack.push_async_callback(_stop, service)
            for endpoint in endpoints:
                answer = _spawning(tasks, endpoint)

                async def handle(request: MicroRequest, answer: _Callback = answer) -> None:
                    await answer(request._msg)  # noqa: SLF001 - the message outlives the serial handler

                label = endpoint.subject.removeprefix("giornata.").replace(".", "-")
                await service.add_endpoint(name=label, subject=endpoint.subject, handler=handle)
            stack.push_async_callback(_drain_endpoints, self.client, service)
            await barrier(self.client)
            yield

    @asynccontextmanager
    async def listen(
        self, subject: str, kind: type[M], callback: Callable[[M], None], *, limit: int = 65536
    ) -> AsyncIterator[None]:
        """Call `callback` with every message on `subject`; it must only decide or enqueue.

        Malformed messages are logged and dropped.
        """

        async def receive(message: Msg) -> None:
            try:
                callback(codec.decode(kind, message.data))
            except GiornataError as error:
                log.warning("message_dropped", subject=message.subject, error=str(error))

        subscription = await self.client.subscribe(subject, cb=receive, pending_msgs_limit=limit)
        await barrier(self.client)
        try:
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):  # a closed connection has no subscriptions
                await subscription.unsubscribe()


_Callback = Callable[[Msg], Awaitable[None]]


@asynccontextmanager
async def connect(url: str, name: str, *, timeout_s: float = 10) -> AsyncIterator[Bus]:
    """A connection that reconnects for ever while it is up and drains on leaving.

    Raises:
        ServiceUnavailable: no server answers within `timeout_s`.
    """

    async def reconnected() -> None:
        log.info("nats_reconnected")
        for callback in bus.on_reconnect:
            callback()

    async def disconnected() -> None:
        if not (client.is_closed or client.is_draining):
            log.warning("nats_disconnected")

    async def failed(error: Exception) -> None:
        log.warning("nats_error", error=repr(error))

    client = Client()
    bus = Bus(client)
    try:
        async with asyncio.timeout(timeout_s):
            await client.connect(
                servers=[part.strip() for part in url.split(",")],
                name=name,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=1,
                reconnected_cb=reconnected,
                disconnected_cb=disconnected,
                error_cb=failed,
            )
    except (OSError, TimeoutError, nats.errors.Error) as error:
        await _close(client)
        raise ServiceUnavailable("No NATS server answers; is GIORNATA_NATS_URL right?") from error
    except BaseException:  # cancelled while connecting: the client has begun tasks
        await _close(client)
        raise
    try:
        yield bus
    finally:
        await _leave(client)


async def _leave(client: Client) -> None:
    """Drain the connection if there is one; close it in any case."""
    try:
        if client.is_connected:
            await client.drain()
    except nats.errors.Error as error:  # it was lost on the way
        log.warning("not_drained", error=repr(error))
    finally:
        await _close(client)


async def _close(client: Client) -> None:
    if not client.is_connected:  # close() would write what waits to the broken socket, fail and stop half-way
        client._pending, client._pending_data_size = [], 0  # noqa: SLF001 - nats-py has no other way
    await client.close()


@asynccontextmanager
async def _drained_tasks() -> AsyncIterator[tuple[asyncio.TaskGroup, AsyncExitStack]]:
    """A task group that outlives the subscriptions which feed it: first drain those, then await the tasks."""
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        yield tasks, stack


def _spawning(tasks: asyncio.TaskGroup, endpoint: Endpoint) -> _Callback:
    async def receive(message: Msg) -> None:
        tasks.create_task(_respond(endpoint, message), name=endpoint.subject)

    return receive


async def _respond(endpoint: Endpoint, message: Msg) -> None:
    """Answer one request; whatever goes wrong is answered too, with a stable code."""
    try:
        request = _request(endpoint, message)
        remaining_ms = getattr(request, "remaining_ms", None)
        try:
            async with asyncio.timeout(None if remaining_ms is None else remaining_ms / 1000) as scope:
                reply = await endpoint.handler(request)
        except TimeoutError as error:
            if not scope.expired():
                raise  # the handler's own
            raise DeadlineExceeded from error
        await message.respond(codec.encode(reply, limit_bytes=endpoint.limit_bytes))
    except GiornataError as error:
        await _respond_error(message, error)
    except nats.errors.MaxPayloadError:
        await _respond_error(message, PayloadTooLarge("The answer is larger than the NATS server accepts."))
    except Exception:  # the task's edge: logged and answered
        log.exception("handler_failed", subject=message.subject)
        await _respond_error(message, InternalError())


def _request(endpoint: Endpoint, message: Msg) -> BaseModel:
    """The request, or MalformedMessage: what the asker sent is the asker's to mend."""
    try:
        return codec.decode(endpoint.kind, message.data)
    except SchemaMismatch as error:
        raise MalformedMessage(str(error)) from error


async def _respond_error(message: Msg, error: GiornataError) -> None:
    if not message.reply:
        log.warning("request_failed_without_reply", subject=message.subject, error=str(error))
        return
    headers = {ERROR_HEADER: error.code, ERROR_CODE_HEADER: str(error.status)}
    try:
        await message._client.publish(message.reply, codec.encode(error.body()), headers=headers)  # noqa: SLF001 - Msg.respond takes no headers
    except nats.errors.Error:
        log.warning("reply_lost", subject=message.subject, error=str(error), exc_info=True)


async def barrier(client: Client) -> None:
    """Return when the server has processed every command given before: subscriptions are in force, or gone.

    The client's own `flush` writes its PING at once, ahead of commands that its flusher task has yet to write; before
    the second PING they are written.
    """
    await client.flush()
    await client.flush()


async def _drain(client: Client, subscription: Subscription) -> None:
    """Take in what was delivered and nothing more; without a connection nothing comes, and nothing is waited for."""
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


async def _drain_endpoints(client: Client, service: Any) -> None:
    """Let the endpoints finish what was delivered to them; `Service.stop` would drop it."""
    endpoints: Sequence[Any] = service._endpoints  # noqa: SLF001 - nats.micro has no drain
    await asyncio.gather(*(_drain(client, endpoint._subscription) for endpoint in endpoints))  # noqa: SLF001 - as above
    service._endpoints = []  # noqa: SLF001 - so that stop() does not unsubscribe them again


async def _stop(service: Service) -> None:
    with contextlib.suppress(nats.errors.Error):  # a closed connection has no service
        await service.stop()
