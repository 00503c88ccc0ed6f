"""LoRAs that are due, profiled over one connection as the NATS user `profiler`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import nats.errors

from giornata.blobs import open_blobs
from giornata.bus import bus
from giornata.bus.bus import Bus
from giornata.deadlines import heed_cancel
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.errors import (
    DeadlineExceeded,
    GiornataError,
    LoraNotFound,
    LoraNotReady,
    ModelNotFound,
    NotPermitted,
    ServiceUnavailable,
)
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import FleetSummary
from giornata_tools.lora_profiler.probes import Probe, built_in
from giornata_tools.lora_profiler.profiler import Done, LoraProfile, LoraProfiler, ProbeSetting

if TYPE_CHECKING:
    from giornata_tools.launcher.stack import Stack

# The models that are served, as the router tells.


class ServedModels:
    """The models that are served. Used from one event loop; make it with :meth:`listening`."""

    def __init__(self) -> None:
        self._cards: tuple[ModelCard, ...] = ()
        self.news = asyncio.Event()
        """Set when the served models have changed; a task that waits for it clears it."""

    @classmethod
    @asynccontextmanager
    async def listening(cls, bus: Bus) -> AsyncIterator[ServedModels]:
        """Hear the router while inside."""
        served = cls()
        async with bus.listen(subjects.SUMMARY, FleetSummary, served.hear):
            yield served

    def hear(self, summary: FleetSummary) -> None:
        """Take in what the router tells."""
        if self._cards != summary.models:
            self._cards = summary.models
            self.news.set()

    def card(self, record: LoraRecord) -> ModelCard | None:
        """The checkpoint that a LoRA is for; None while it is not served."""
        wanted = (record.model, record.canonical and record.canonical.model_digest)
        return next((card for card in self._cards if (card.name, card.digest) == wanted), None)


# One connection as the NATS user `profiler`: LoRAs by name, the ones that are due, or all that come, one after
# the other, as soon as their models are served.


HEARD_S: Final = 10.0
"""How long the routers are waited for; they tell every second what is served."""
RETRY_S: Final = 60.0
"""After how long a LoRA comes again that could not be profiled for a reason that passes."""

Begin = Callable[[LoraRecord], Done]
"""Is told of a LoRA that is profiled now; what it returns is told of its edits."""
Ended = Callable[[LoraRecord, LoraProfile | GiornataError], None]
"""Is told what became of it."""


@dataclass(frozen=True)
class ProfilerLogin:
    """The address of the system, and the credentials of the profiler."""

    nats_url: str
    password_file: Path | None = None
    blobs_url: str | None = None


@dataclass
class ProfilerSession:
    """A connected profiler. Used from one event loop; make it with :func:`connected`."""

    records: LoraRecords
    profiler: LoraProfiler
    served: ServedModels
    retry_s: float = RETRY_S
    _waiting: dict[str, LoraRecord] = field(default_factory=dict)
    """Those that :meth:`watch` has not profiled yet, by key."""
    _not_before_s: dict[str, float] = field(default_factory=dict)
    """When those may come again that could not be profiled, on the monotonic clock."""

    async def found(self, ids: Iterable[str]) -> list[LoraRecord]:
        """The LoRAs of these ids, of any tenant.

        Raises:
            LoraNotFound: one of them is none.
        """
        found = []
        for lora_id in ids:
            try:
                named = await self.records.bucket.matching(f"*.{subjects.token(lora_id)}")
            except ValueError as error:
                raise LoraNotFound(received=lora_id) from error
            if not named:
                raise LoraNotFound(received=lora_id)
            found += named
        return found

    async def due(self) -> list[LoraRecord]:
        """The LoRAs that were not profiled yet, the oldest first."""
        return sorted(filter(is_due, await self.records.all()), key=lambda record: record.created_s)

    async def profile(self, records: Iterable[LoraRecord], begin: Begin, ended: Ended) -> bool:
        """Profile these, one after the other; whether all could be."""
        whole = True
        for record in records:
            try:
                outcome = await self._outcome(record, await self._card(record), begin)
            except GiornataError as error:
                outcome = error
            whole = whole and not isinstance(outcome, GiornataError)
            ended(record, outcome)
        return whole

    async def watch(self, begin: Begin, ended: Ended) -> None:
        """Profile what is due and what comes. It never returns; called once.

        Raises:
            ServiceUnavailable: the records can be followed no more.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._follow(), name="follow-loras")
                while True:
                    heed_cancel()
                    key, record, card = await self._next()
                    outcome = await self._outcome(record, card, begin)
                    again = isinstance(outcome, GiornataError) and _passes(outcome)
                    if self._waiting.get(key) == record and not again:
                        del self._waiting[key]
                    if again:
                        self._postpone(key)
                    ended(record, outcome)
        except ExceptionGroup as group:
            lost, rest = group.split(nats.errors.Error)
            if lost is None or rest is not None:
                raise
            raise ServiceUnavailable(
                f"The records of LoRAs cannot be followed: {lost.exceptions[0]}."
            ) from lost

    async def _follow(self) -> None:
        """Keep what waits up to date with the records."""
        async with aclosing(self.records.bucket.changes(">")) as changes:
            async for key, record in changes:
                self._not_before_s.pop(key, None)
                if record is not None and is_due(record):
                    self._waiting[key] = record
                    self.served.news.set()
                else:
                    self._waiting.pop(key, None)

    async def _next(self) -> tuple[str, LoraRecord, ModelCard]:
        """The oldest LoRA whose turn it is and whose model is served, as soon as there is one."""
        while True:
            self.served.news.clear()
            now_s = time.monotonic()
            for key, record in sorted(self._waiting.items(), key=lambda item: item[1].created_s):
                card = self.served.card(record)
                if card is not None and self._not_before_s.get(key, 0.0) <= now_s:
                    return key, record, card
            await self.served.news.wait()

    async def _outcome(
        self, record: LoraRecord, card: ModelCard, begin: Begin
    ) -> LoraProfile | GiornataError:
        try:
            return await self.profiler.profile(record, card, begin(record))
        except GiornataError as error:
            return error

    def _postpone(self, key: str) -> None:
        self._not_before_s[key] = time.monotonic() + self.retry_s
        asyncio.get_running_loop().call_later(self.retry_s, self.served.news.set)

    async def _card(self, record: LoraRecord) -> ModelCard:
        if not is_due(record.model_copy(update={"joins_within": None})):
            raise LoraNotReady(received=str(record.state), accepted="a LoRA that is ready")
        try:
            async with asyncio.timeout(HEARD_S):
                while (card := self.served.card(record)) is None:
                    self.served.news.clear()
                    await self.served.news.wait()
        except TimeoutError:
            raise ServiceUnavailable(
                f"The checkpoint of the model {record.model} that the LoRA is for is not served.",
                retry_after_s=HEARD_S,
            ) from None
        return card


def is_due(record: LoraRecord) -> bool:
    """Return whether a LoRA can be used and was not profiled yet."""
    return record.state is LoraState.READY and record.canonical is not None and record.joins_within is None


def _passes(error: GiornataError) -> bool:
    """Return whether an error says nothing of the LoRA: what it needs is away."""
    return error.retryable or isinstance(error, ModelNotFound | DeadlineExceeded)


@asynccontextmanager
async def connected(
    login: ProfilerLogin, setting: ProbeSetting, probes: list[Probe] | None = None
) -> AsyncIterator[ProfilerSession]:
    """A session while inside, with `probes`, or with those that are built in.

    Raises:
        ServiceUnavailable: no server answers, or lets us in.
        NotPermitted: the user may not do what a profiler does.
    """
    async with AsyncExitStack() as stack:
        connection = await stack.enter_async_context(
            bus.connect(login.nats_url, "profiler", user=NatsRole.PROFILER, password_file=login.password_file)
        )
        blobs = await stack.enter_async_context(open_blobs(login.blobs_url)) if login.blobs_url else None
        served = await stack.enter_async_context(ServedModels.listening(connection))
        try:
            records = await LoraRecords.open(connection.jetstream)
        except nats.errors.Error as error:
            raise NotPermitted(
                "The records of LoRAs do not answer.",
                accepted="a server with a LoRA store, and the password of the NATS user profiler",
            ) from error
        choose = built_in if probes is None else lambda _: probes
        yield ProfilerSession(records, LoraProfiler(connection, blobs, choose, setting), served)


# LoRAs of a running stack, profiled in the background.


async def profiling(stack: Stack, say: Callable[[str], None]) -> None:
    """Profile the LoRAs of `stack` until cancelled, one edit at a time, and say how late each may join.

    Where that cannot go on, it says so and waits: the stack stays.
    """

    def begin(_: LoraRecord) -> Done:
        return lambda _edits, _tried: None

    def ended(record: LoraRecord, outcome: LoraProfile | GiornataError) -> None:
        name = record.name or record.lora_id
        if isinstance(outcome, GiornataError):
            say(f"The LoRA {name} could not be profiled: {outcome}")
        else:
            say(f"The LoRA {name} may join after {outcome.joins_within:.0%} of the steps.")

    login = ProfilerLogin(stack.nats_url, stack.nats_password_file(NatsRole.PROFILER), stack.blobs_url)
    try:
        async with connected(login, ProbeSetting(in_flight=1)) as session:
            await session.watch(begin, ended)
    except Exception as error:  # noqa: BLE001 - the task's edge: said, and the stack goes on
        say(f"LoRAs are profiled no more: {error}")
    await asyncio.Event().wait()
