"""Answers to requests: which handler takes which, and how its result or its failure becomes a message."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import nats.errors
import structlog
from nats.aio.msg import Msg
from nats.micro.request import ERROR_CODE_HEADER, ERROR_HEADER
from pydantic import BaseModel

from giornata.bus.connection import MAX_HEADER_BYTES, OVERSIZED
from giornata.seeing.spans import span
from giornata.seeing.told import TraceSpanKind
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    InternalError,
    MalformedMessage,
    PayloadTooLarge,
    SchemaMismatch,
)

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
    name: str = field(init=False)
    """The subject without what differs from instance to instance, for spans."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", subjects.kind_of(self.subject))

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


def spawning(tasks: asyncio.TaskGroup, endpoint: Endpoint) -> Receive:
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
