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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import nats
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.micro import add_service
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from nats.micro.request import Request as MicroRequest
from nats.micro.service import ServiceConfig as MicroConfig
from pydantic import BaseModel

from giornata import __version__
from giornata.bus.connection import Login, LostError, RefusedError, TellingClient, opened
from giornata.bus.subscriptions import drain, drain_endpoints, drained_tasks, in_force, stop
from giornata.config import ServiceConfig
from giornata.deadlines import Deadline
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    ErrorBody,
    GiornataError,
    InternalError,
    MalformedMessage,
    NotPermitted,
    PayloadTooLarge,
    SchemaMismatch,
    ServiceUnavailable,
    from_body,
)
from giornata.wire.permissions import User
from giornata.wire.workers import ServiceName

log = structlog.get_logger(__name__)

M = TypeVar("M", bound=BaseModel)

MESSAGE_ID = "Nats-Msg-Id"
"""Header by which a stream knows a message that it has."""
RETURN_MS = 3000
"""How long after our connection is back that of another service may take; a client tries each server once a second."""


@dataclass(frozen=True)
class Endpoint:
    """A subject, the type of its requests, and the coroutine that answers one."""

    subject: str
    kind: type[BaseModel]
    handler: Callable[..., Awaitable[BaseModel]]
    """Takes a request, and where `headers` says so its headers."""
    limit_bytes: int = codec.MAX_CONTROL_BYTES
    headers: bool = False


class Bus:
    """One NATS connection. Make it with :func:`connect`."""

    def __init__(self, client: TellingClient) -> None:
        self.client = client
        self.jetstream: JetStreamContext = client.jetstream()
        self.on_reconnect = client.on_reconnect
        """Called after the connection was lost and is back: core messages of the meantime are gone."""

    async def publish(self, subject: str, message: BaseModel, *, message_id: str | None = None) -> None:
        """Tell whoever listens; nothing is awaited but the socket's buffer.

        A stream that captures the subject keeps what comes again under a `message_id` once. Who listens hears it again.
        """
        headers = None if message_id is None else {MESSAGE_ID: message_id}
        await self.client.publish(subject, codec.encode(message), headers=headers)

    async def call(
        self,
        subject: str,
        request: BaseModel,
        reply: type[M],
        deadline: Deadline,
        *,
        limit_bytes: int = codec.MAX_CONTROL_BYTES,
    ) -> M:
        """Ask and wait for the answer until `deadline`; ask again where the connection was lost meanwhile.

        So a request may arrive twice: whoever answers does what it asks for once, or can do it again.

        Raises:
            ServiceUnavailable: nobody listens on the subject, or there is no connection.
            NotPermitted: our NATS user may not ask there.
            PayloadTooLarge: the request is larger than `limit_bytes` or than the server accepts.
            DeadlineExceeded: no answer in time.
            GiornataError: what the other side raised, as the same class.
        """
        deadline.check()
        data = codec.encode(request, limit_bytes=limit_bytes)
        try:
            message = await self._request(subject, data, deadline)
        except nats.errors.NoRespondersError as error:
            raise ServiceUnavailable(f"No service answers on {subject}.", retry_after_s=1) from error
        except nats.errors.TimeoutError as error:
            raise DeadlineExceeded(f"No answer on {subject} in time.") from error
        except nats.errors.MaxPayloadError as error:
            raise PayloadTooLarge("The request is larger than the NATS server accepts.") from error
        except RefusedError as error:
            raise NotPermitted(received=subject) from error
        except nats.errors.Error as error:
            raise ServiceUnavailable("There is no connection to NATS.", retry_after_s=1) from error
        if message.headers and ERROR_CODE_HEADER in message.headers:
            raise from_body(codec.decode(ErrorBody, message.data))
        return codec.decode(reply, message.data)

    async def _request(self, subject: str, data: bytes, deadline: Deadline) -> Msg:
        """The answer; after a loss of the connection, whoever gave it may take a moment longer to be back than we."""
        lost, returning = False, None
        while True:
            try:
                return await self.client.request(subject, data, timeout=deadline.remaining_s())
            except LostError:
                log.info("asked_again", subject=subject)
                lost, returning = True, None
            except nats.errors.NoRespondersError:
                returning = returning or Deadline.after_ms(RETURN_MS if lost else 0)
                if not returning.remaining_s():
                    raise
                await asyncio.sleep(0.1)  # who is there again tells nobody
            deadline.check()

    @asynccontextmanager
    async def answer(self, *endpoints: Endpoint) -> AsyncIterator[None]:
        """Answer requests on plain subjects that have one owner; on leaving, finish those that were delivered.

        Raises:
            NotPermitted: our NATS user may not listen there; so :meth:`serve` and :meth:`listen`.
        """
        async with drained_tasks() as (tasks, stack):
            for endpoint in endpoints:
                subscription = await self.client.subscribe(endpoint.subject, cb=_spawning(tasks, endpoint))
                stack.push_async_callback(drain, self.client, subscription)
            await in_force(self.client, *(endpoint.subject for endpoint in endpoints))
            yield

    @asynccontextmanager
    async def serve(self, name: str, *endpoints: Endpoint, instance: str) -> AsyncIterator[None]:
        """Answer requests as one instance of a micro service, in a queue group, visible to ``nats micro ls``."""
        config = MicroConfig(name=f"giornata-{name}", version=__version__, metadata={"instance": instance})
        async with drained_tasks() as (tasks, stack):
            service = await add_service(self.client, config)
            stack.push_async_callback(stop, service)
            for endpoint in endpoints:
                answer = _spawning(tasks, endpoint)

                async def handle(request: MicroRequest, answer: _Callback = answer) -> None:
                    await answer(request._msg)  # noqa: SLF001 - the message outlives the serial handler

                label = endpoint.subject.removeprefix("giornata.").replace(".", "-")
                await service.add_endpoint(name=label, subject=endpoint.subject, handler=handle)
            stack.push_async_callback(drain_endpoints, self.client, service)
            await in_force(self.client, *(endpoint.subject for endpoint in endpoints))
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
        try:
            await in_force(self.client, subject)
            yield
        finally:
            with contextlib.suppress(nats.errors.Error):  # a closed connection has no subscriptions
                await subscription.unsubscribe()


_Callback = Callable[[Msg], Awaitable[None]]


def connect_as(service: ServiceName, config: ServiceConfig) -> AbstractAsyncContextManager[Bus]:
    """The connection of a service, as its configuration says; see :func:`connect`."""
    return connect(
        config.nats_url, config.instance, user=User(service), password_file=config.nats_password_file
    )


@asynccontextmanager
async def connect(
    url: str,
    name: str,
    *,
    user: User = User.APPLICATION,
    password_file: Path | None = None,
    timeout_s: float = 10,
) -> AsyncIterator[Bus]:
    """A connection that reconnects for ever while it is up and drains on leaving.

    Args:
        url: NATS server(s), comma-separated; they may hold a user and a password.
        name: in the server's list of connections.
        user: whose inboxes answers come to, and who logs in where there is a password file.
        password_file: holds the password of `user`; None where the address does, or the server asks for none.
        timeout_s: how long servers are tried.

    Raises:
        ServiceUnavailable: no server answers, or lets us in, within `timeout_s`; or there is no password.
    """
    login = Login(user, password_file)
    async with opened(url, name, login, timeout_s) as client:
        yield Bus(client)


def _spawning(tasks: asyncio.TaskGroup, endpoint: Endpoint) -> _Callback:
    async def receive(message: Msg) -> None:
        if message.reply and not subjects.is_inbox(message.reply):
            log.error("answer_refused", subject=message.subject, reply=message.reply[:200])
            return
        tasks.create_task(_respond(endpoint, message), name=endpoint.subject)

    return receive


async def _respond(endpoint: Endpoint, message: Msg) -> None:
    """Answer one request; whatever goes wrong is answered too, with a stable code."""
    try:
        request = _request(endpoint, message)
        remaining_ms = getattr(request, "remaining_ms", None)
        try:
            async with asyncio.timeout(None if remaining_ms is None else remaining_ms / 1000) as scope:
                reply = await endpoint.handler(
                    request, *((message.headers or {},) if endpoint.headers else ())
                )
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
