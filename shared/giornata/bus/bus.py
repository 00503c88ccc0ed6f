"""The NATS edge: connect and drain, call with the remaining time, answer with mapped errors, publish, subscribe.

This module hides traps of the client library. A subscription runs its callback serially, so handlers run as tasks of a
group. A micro service's `stop` drops delivered requests, so its subscriptions are drained first. A payload above the
server's limit closes the connection. `flush` overtakes unwritten commands (:func:`giornata.bus.connection.barrier` does
not).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import nats
import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import Header
from nats.micro import add_service
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from nats.micro.request import Request as MicroRequest
from nats.micro.service import ServiceConfig as MicroConfig
from pydantic import BaseModel

from giornata import __version__, tracing
from giornata.bus.connection import (
    MAX_HEADER_BYTES,
    OVERSIZED,
    FailFastNatsClient,
    LostError,
    RefusedError,
    TrackedSubscription,
    barrier,
    drain,
    drain_service,
    drained_tasks,
    open_client,
)
from giornata.config import ServiceConfig
from giornata.deadlines import Deadline
from giornata.logs import LogSink
from giornata.tracing import TraceSpanKind, span
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
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState

log = structlog.get_logger(__name__)

Receive: TypeAlias = Callable[[Msg], Awaitable[None]]


@dataclass(frozen=True)
class Endpoint:
    """A subject, the type of its requests, and the coroutine that answers one."""

    subject: str
    kind: type[BaseModel]
    handler: Callable[..., Awaitable[BaseModel]]
    """Takes a request, and its headers if `headers` says so."""
    limit_bytes: int = codec.MAX_CONTROL_BYTES
    headers: bool = False
    reply: bool = False
    """Whether the handler takes the answer's subject, too, after the headers; it is empty where none is asked for."""
    unread: Callable[[GiornataError], None] | None = None
    """Is told of every message that reaches no handler, and why."""
    admit: Callable[[Mapping[str, object], str], None] | None = None
    """Takes the fields of a stranger's message and its answer's subject; refuses it before anything else is read."""
    door: bool = False
    """Whether a trace begins here, where the request brings none."""

    @cached_property
    def name(self) -> str:
        """The subject without what differs from instance to instance, for spans."""
        return subjects.kind_of(self.subject)

    def request_in(self, message: Msg) -> BaseModel:
        """The request that a message holds; MalformedMessage where it holds none, or what `admit` raises."""
        try:
            if (size := (message.headers or {}).get(OVERSIZED)) is not None:
                raise MalformedMessage(
                    "The headers are too large.", received=size, accepted=f"{MAX_HEADER_BYTES} bytes"
                )
            fields = codec.fields_of(self.kind, message.data, limited=self.admit is not None)
            if self.admit is not None:
                self.admit(fields, message.reply)
            return codec.validated(self.kind, fields)
        except SchemaMismatch as error:
            refusal = MalformedMessage(str(error))
            self.not_read(refusal)
            raise refusal from error
        except GiornataError as refusal:
            self.not_read(refusal)
            raise

    def not_read(self, why: GiornataError) -> None:
        """A message reaches no handler."""
        if self.unread is not None:
            self.unread(why)


class UnansweredError(Exception):
    """Raised by a handler: the request gets no answer, since it is not ours to answer."""


def answer_in_tasks(tasks: asyncio.TaskGroup, endpoint: Endpoint) -> Receive:
    """The callback of a subscription that answers each request in a task of its own."""

    async def receive(message: Msg) -> None:
        if message.reply and not subjects.is_inbox(message.reply):
            log.error("answer_refused", subject=message.subject, reply=message.reply[:200])
            endpoint.not_read(MalformedMessage("The answer goes to no inbox."))
            return
        tasks.create_task(_respond(endpoint, message), name=endpoint.subject)

    return receive


async def _respond(endpoint: Endpoint, message: Msg) -> None:
    """Answer one request; every failure is an answer too, with a stable code, except :class:`UnansweredError`."""
    try:
        request = endpoint.request_in(message)
        remaining_ms = getattr(request, "remaining_ms", None)
        try:
            async with asyncio.timeout(None if remaining_ms is None else remaining_ms / 1000) as scope:
                brought = message.headers or {}
                headers = [brought] if endpoint.headers else []
                asked = [message.reply] if endpoint.reply else []
                with span(
                    endpoint.name,
                    TraceSpanKind.ANSWERS,
                    root=endpoint.door,
                    parent=brought,
                    subject=endpoint.name,
                ):
                    reply = await endpoint.handler(request, *headers, *asked)
        except TimeoutError as error:
            if not scope.expired():
                raise  # the handler's own
            raise DeadlineExceeded from error
        if message.reply:
            await message.respond(codec.encode(reply, limit_bytes=endpoint.limit_bytes))
    except GiornataError as error:
        await _respond_error(message, error)
    except UnansweredError:
        log.info("left_unanswered", subject=message.subject)
    except nats.errors.MaxPayloadError:
        await _respond_error(message, PayloadTooLarge("The answer is larger than the NATS server accepts."))
    except Exception:  # the task's edge: logged and answered
        log.exception("handler_failed", subject=message.subject)
        await _respond_error(message, InternalError())


async def _respond_error(message: Msg, error: GiornataError) -> None:
    if not message.reply:
        log.warning("request_failed_without_reply", subject=message.subject, error=str(error))
        return
    headers = {ERROR_HEADER: error.code, ERROR_CODE_HEADER: str(error.status)}
    try:
        await message._client.publish(message.reply, codec.encode(error.body()), headers=headers)  # noqa: SLF001 - Msg.respond takes no headers
    except nats.errors.Error:
        log.warning("reply_lost", subject=message.subject, error=str(error), exc_info=True)


M = TypeVar("M", bound=BaseModel)

RETURN_MS = 3000
"""How much later than ours another service's connection may be back; a client tries each server once a second."""


class Bus:
    """One NATS connection. Make it with :func:`connect`."""

    def __init__(self, client: FailFastNatsClient) -> None:
        self.client = client
        self.jetstream: JetStreamContext = client.jetstream()
        self.on_reconnect = client.on_reconnect
        """Called when a lost connection is back: core messages of the meantime are gone."""

    async def publish(self, subject: str, message: BaseModel, *, message_id: str | None = None) -> None:
        """Send a message to all listeners; awaits the socket's buffer only.

        A stream that captures the subject keeps one message for a `message_id`; listeners hear every repetition.
        """
        headers = None if message_id is None else {Header.MSG_ID.value: message_id}
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
        """Ask and wait for the answer until `deadline`; ask again if the connection was lost meanwhile.

        So a request may arrive twice: its handler is idempotent.

        Raises:
            ServiceUnavailable: no service listens on the subject, or there is no connection.
            NotPermitted: our NATS user may not ask there.
            PayloadTooLarge: the request is larger than `limit_bytes`, or than the server accepts.
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
        return answer_in(message, reply)

    async def _request(self, subject: str, data: bytes, deadline: Deadline) -> Msg:
        """The answer. After a loss of the connection, the other service may be back a moment later than this one."""
        lost, returning = False, None
        while True:
            try:
                return await self.client.request(
                    subject, data, timeout=deadline.remaining_s(), headers=tracing.headers()
                )
            except LostError:
                log.info("asked_again", subject=subject)
                lost, returning = True, None
            except nats.errors.NoRespondersError:
                returning = returning or Deadline.after_ms(RETURN_MS if lost else 0)
                if not returning.remaining_s():
                    raise
                await asyncio.sleep(0.1)  # a service that is back does not announce it
            deadline.check()

    @asynccontextmanager
    async def answer(self, *endpoints: Endpoint) -> AsyncIterator[None]:
        """Answer requests on plain subjects that have one owner; on leaving, finish the delivered ones.

        NotPermitted if our NATS user may not listen there; :meth:`serve` and :meth:`listen` raise it, too.
        """
        async with drained_tasks() as (tasks, stack):
            for endpoint in endpoints:
                subscription = await self.client.subscribe(
                    endpoint.subject, cb=answer_in_tasks(tasks, endpoint)
                )
                stack.push_async_callback(drain, self.client, subscription)
            await self.client.in_force(*(endpoint.subject for endpoint in endpoints))
            yield

    @asynccontextmanager
    async def serve(self, name: str, *endpoints: Endpoint, instance: str) -> AsyncIterator[None]:
        """Answer requests as one instance of a micro service, in a queue group, visible to ``nats micro ls``."""
        config = MicroConfig(name=f"giornata-{name}", version=__version__, metadata={"instance": instance})
        async with drained_tasks() as (tasks, stack):
            service = await add_service(self.client, config)
            stack.push_async_callback(drain_service, self.client, service)
            for endpoint in endpoints:
                answer = answer_in_tasks(tasks, endpoint)

                async def handle(request: MicroRequest, answer: Receive = answer) -> None:
                    await answer(request._msg)  # noqa: SLF001 - the message outlives the serial handler

                label = endpoint.subject.removeprefix("giornata.").replace(".", "-")
                await service.add_endpoint(name=label, subject=endpoint.subject, handler=handle)
            await self.client.in_force(*(endpoint.subject for endpoint in endpoints))
            yield

    @asynccontextmanager
    async def listen(
        self,
        subject: str,
        kind: type[M],
        callback: Callable[[M], None],
        read: Callable[[bytes], M] | None = None,
    ) -> AsyncIterator[TrackedSubscription]:
        """Call `callback` with every message on `subject`; it must only decide or enqueue.

        Malformed messages are logged and dropped. `read` decodes a message, by default as every `kind` is decoded.
        """
        listening, read = TrackedSubscription(self.client), read or partial(codec.decode, kind)

        async def receive(message: Msg) -> None:
            try:
                callback(read(message.data))
            except GiornataError as error:
                log.warning("message_dropped", subject=message.subject, error=str(error))
            finally:
                listening.handled()

        subscription = await self.client.subscribe(subject, cb=receive, pending_msgs_limit=65536)
        listening.subscription = subscription
        try:
            await self.client.in_force(subject)
            yield listening
        finally:
            with contextlib.suppress(nats.errors.Error):  # a closed connection has no subscriptions
                await subscription.unsubscribe()


def answer_in(message: Msg, reply: type[M]) -> M:
    """The answer that a message holds; an error of the other side is raised as the same class."""
    if message.headers and ERROR_CODE_HEADER in message.headers:
        raise from_body(codec.decode(ErrorBody, message.data))
    return codec.decode(reply, message.data)


def connect_as(service: ServiceName, config: ServiceConfig) -> AbstractAsyncContextManager[Bus]:
    """The connection of a service, as its configuration says; see :func:`connect`."""
    return connect(
        config.nats_url, config.instance, user=NatsRole(service), password_file=config.nats_password_file
    )


@asynccontextmanager
async def connect(
    url: str,
    name: str,
    *,
    user: str = NatsRole.APPLICATION,
    password_file: Path | None = None,
    timeout_s: float = 10,
) -> AsyncIterator[Bus]:
    """A connection that reconnects for ever while it is up and drains on leaving.

    Answers come to the inboxes of `user`, which logs in if there is a password file. Without one, the comma-separated
    servers of `url` hold user and password, or ask for none; an application that is named there has inboxes of its own.
    `name` stands in the server's list of connections.
    ServiceUnavailable if no server answers, or lets us in, within `timeout_s`, or the password cannot be read.
    """
    async with open_client(url, name, user, password_file, timeout_s) as client:
        yield Bus(client)


Report = Callable[[], ServiceState]

RETOLD_S: Final = 5.0
"""How often a worker tells its blocks and what it has recorded though neither has changed: for a router that has just
started, and after a lost message. The list is always whole, so that the next one makes up for any that was lost.
"""


class TelemetryDeduplicator:
    """Leaves out of telemetry what was told lately and has not changed since: it is most of a worker's message."""

    def __init__(self) -> None:
        self._told: tuple[object, ...] | None = None
        self._told_s = -math.inf

    def spared(self, state: ServiceState, now: float) -> ServiceState:
        """Return what to tell of `state`. The order of recordings by use is no news."""
        worker = state.worker
        if worker is None or (worker.resident is None and worker.adapters_resident is None):
            return state
        resident = [
            {tier: frozenset(ids) for tier, ids in (here or {}).items()}
            for here in (worker.resident, worker.adapters_resident)
        ]
        telling = resident, worker.blocks
        if telling != self._told or now - self._told_s >= RETOLD_S:
            self._told, self._told_s = telling, now
            return state
        spared = {"resident": None, "adapters_resident": None, "blocks": None}
        return state.model_copy(update={"worker": worker.model_copy(update=spared)})


def state_of(service: ServiceName, config: ServiceConfig, **told: Any) -> ServiceState:
    """The state of an instance of this process; ready, unless `told`, fields that only it knows, says otherwise."""
    own = {
        "service": service,
        "instance": config.instance,
        "host": socket.gethostname(),
        "version": __version__,
        "log_lines_lost": LogSink.lost,
    }
    return ServiceState.model_validate(own | {"ready": True} | told)


@asynccontextmanager
async def telemetry(bus: Bus, hz: float, report: Report) -> AsyncIterator[None]:
    """Publish `report()` `hz` times a second while inside; on leaving, say that this instance is draining.

    A failure is logged, and the next state is sent all the same: silence would mean death. A worker's blocks, and
    what it has recorded, are sent when that changes, and every :data:`RETOLD_S`.
    """
    task = asyncio.create_task(_publish_states(bus, hz, report), name="telemetry")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await _publish_now(bus, lambda: report().model_copy(update={"ready": False, "draining": True}))
        if bus.client.is_connected:
            with contextlib.suppress(nats.errors.Error):
                await barrier(bus.client)


async def publish_state(bus: Bus, state: ServiceState) -> None:
    """Send one state at once, for a change that others should not wait for."""
    await bus.publish(subjects.telemetry(state.service, state.instance), state)


async def _publish_states(bus: Bus, hz: float, report: Report) -> None:
    sparing = TelemetryDeduplicator()
    while True:
        await _publish_now(bus, lambda: sparing.spared(report(), time.monotonic()))
        await asyncio.sleep(1 / hz)  # the rate of telemetry, not a poll


async def _publish_now(bus: Bus, report: Report) -> None:
    if not bus.client.is_connected:
        return
    try:
        await publish_state(bus, report())
    except Exception:  # the task's edge: logged
        log.exception("telemetry_failed")
