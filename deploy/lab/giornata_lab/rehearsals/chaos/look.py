"""What the stack keeps and uses: records, streams, blobs, processes. Read only, as NATS users that may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import redis.asyncio
from nats.js import JetStreamContext
from nats.js.errors import KeyNotFoundError, NotFoundError
from nats.js.kv import KeyValue
from tenacity import AsyncRetrying, stop_after_delay, wait_fixed
from tenacity.retry import retry_if_result

from giornata.blobs.redis import PREFIX
from giornata.bus import bus
from giornata.bus.connection import COMING_UP_S, ask_jetstream
from giornata.wire import codec, subjects
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.messages import DoneEvent, EventKind
from giornata.wire.subjects import NatsRole, events_of_kind

QUIET_S: Final = 60.0
"""How long the stack may take to clear up behind the last edit."""


@dataclass(frozen=True)
class OutcomeRecord:
    """A job's record when it was looked at."""

    revision: int
    state: JobState
    code: str | None
    """Code of the error that ended the job."""
    attempt: int
    pictures: int
    causes: tuple[str, ...] = ()


class Records:
    """Job records with their revisions. Make it with :func:`watching`."""

    def __init__(self, jetstream: JetStreamContext, bucket: KeyValue) -> None:
        self.jetstream = jetstream
        self._bucket = bucket

    async def of(self, job_id: str) -> OutcomeRecord | None:
        """The record as it stands; None where there is none."""
        try:
            entry = await ask_jetstream(lambda: self._bucket.get(job_id), COMING_UP_S)
        except KeyNotFoundError:
            return None
        if entry.value is None or entry.revision is None:
            return None
        record = codec.decode(JobRecord, entry.value)
        return OutcomeRecord(
            revision=entry.revision,
            state=record.state,
            code=record.error.code if record.error else None,
            attempt=record.attempt,
            pictures=len(record.images),
            causes=record.causes,
        )


@asynccontextmanager
async def watching(
    nats_url: str, password: Callable[[NatsRole], Path | None], hear: Callable[[DoneEvent], None]
) -> AsyncIterator[Records]:
    """The records, and every `done` event, while inside.

    Args:
        nats_url: of the stack.
        password: file of a user's password.
        hear: is told of ended jobs, as often as it is published and heard.
    """
    router, gateway = NatsRole.ROUTER, NatsRole.GATEWAY
    async with (
        bus.connect(nats_url, "chaos", user=router, password_file=password(router)) as reading,
        bus.connect(nats_url, "chaos", user=gateway, password_file=password(gateway)) as hearing,
        hearing.listen(events_of_kind(EventKind.DONE), DoneEvent, hear),
    ):
        jetstream = reading.jetstream
        yield Records(jetstream, await jetstream.key_value(subjects.RECORDS))


@dataclass(frozen=True)
class Streams:
    """What JetStream holds."""

    messages: dict[str, int]
    """By stream."""
    consumers: dict[str, int]
    """By stream."""
    events_mib: float
    """Size of events, which are kept in memory."""
    ends: dict[str, int]
    """`done` events that are kept, by subject."""
    unacknowledged: int
    """Messages of the work queue that are not acknowledged."""

    @property
    def quiet(self) -> bool:
        """Return whether no job waits or runs, and nobody follows events."""
        return not (
            self.messages[subjects.JOBS] or self.unacknowledged or self.consumers.get(subjects.EVENTS)
        )


@dataclass(frozen=True)
class Blob:
    """A key of the blob store."""

    key: str
    ttl_s: float
    """-1: for ever."""
    size_bytes: int


@dataclass(frozen=True)
class ProcessUsage:
    """What one process uses."""

    name: str
    """Name of the instance or server."""
    pid: int
    rss_mib: float
    descriptors: int
    threads: int


async def quiet_streams(jetstream: JetStreamContext) -> Streams:
    """Return what JetStream holds once it is quiet, or after :data:`QUIET_S`."""
    waiting = AsyncRetrying(
        wait=wait_fixed(0.5),
        stop=stop_after_delay(QUIET_S),
        retry=retry_if_result(lambda streams: not streams.quiet),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    found: Streams = await waiting(_streams, jetstream)
    return found


async def _streams(jetstream: JetStreamContext) -> Streams:
    messages, consumers, events_bytes = {}, {}, 0
    ends: dict[str, int] = {}
    done = events_of_kind(EventKind.DONE)
    for name in (subjects.JOBS, *subjects.STREAMS):
        try:
            info = await ask_jetstream(lambda name=name: jetstream.stream_info(name, subjects_filter=done))  # type: ignore[misc]  # bound per turn
        except NotFoundError:  # of events, in memory: its server was killed and nobody has told any since
            continue
        messages[name] = info.state.messages
        consumers[name] = info.state.consumer_count
        if name == subjects.EVENTS:
            events_bytes, ends = info.state.bytes, info.state.subjects or {}
    pending = messages[subjects.JOBS]  # in a work queue a message lives until it is acknowledged
    return Streams(messages, consumers, events_bytes / 2**20, ends, pending)


async def blobs(redis_url: str) -> list[Blob]:
    """Every blob of the store."""
    async with redis.asyncio.from_url(redis_url) as client:
        keys = [key async for key in client.scan_iter(f"{PREFIX}*", count=1000)]
        async with client.pipeline(transaction=False) as asking:
            for key in keys:
                asking.pttl(key)
                asking.strlen(key)
            answers = await asking.execute()
    return [
        Blob(key.decode().removeprefix(PREFIX), ttl_ms / 1e3 if ttl_ms > 0 else ttl_ms, size)
        for key, ttl_ms, size in zip(keys, answers[::2], answers[1::2], strict=True)
        if ttl_ms != _GONE
    ]


_GONE: Final = -2


def usage(pids: dict[str, int]) -> list[ProcessUsage]:
    """Return what processes take, memory with their children; those that have just ended are left out.

    Args:
        pids: by name.
    """
    found = []
    for name, pid in pids.items():
        try:
            process = psutil.Process(pid)
            rss = sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
            found.append(ProcessUsage(name, pid, rss / 2**20, process.num_fds(), process.num_threads()))
        except psutil.Error:
            continue
    return found


def marked(mark: str) -> list[str]:
    """Command lines of this user's processes that have `mark` in command line or environment, whoever started them."""
    own = psutil.Process()
    ours = {own.pid, *(parent.pid for parent in own.parents())}
    found = []
    for process in psutil.process_iter():
        if process.pid in ours:
            continue
        try:
            command = process.cmdline()
            if mark in " ".join(command) or any(mark in value for value in process.environ().values()):
                found.append(f"{process.pid} ({process.status()}): {' '.join(command)[:200]}")
        except psutil.Error:
            continue
    return found


async def left(mark: str, limit_s: float) -> list[str]:
    """Return what :func:`marked` still finds after `limit_s`: a killed process takes a moment to go."""
    waiting = AsyncRetrying(
        wait=wait_fixed(0.2),
        stop=stop_after_delay(limit_s),
        retry=retry_if_result(bool),
        retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
    )
    found: list[str] = await waiting(asyncio.to_thread, marked, mark)
    return found
