"""One connection as the NATS user `profiler`: LoRAs by name, the ones that are due, or all that come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import nats.errors

from giornata.blobs import open_blobs
from giornata.bus import bus
from giornata.tenant_records import LoraRecords
from giornata.wire import subjects
from giornata.wire.errors import (
    GiornataError,
    LoraNotFound,
    LoraNotReady,
    NotPermitted,
    ServiceUnavailable,
)
from giornata.wire.loras import LoraRecord
from giornata.wire.models import ModelCard
from giornata.wire.permissions import NatsRole
from giornata_tools.joining.probes import Probe, built_in
from giornata_tools.joining.profiler import LoraProfile, LoraProfiler, ProbeSetting
from giornata_tools.joining.served import ServedModels
from giornata_tools.joining.watching import Begin, LoraProfileWatcher, is_due

HEARD_S: Final = 10.0
"""How long the routers are waited for; they tell every second what is served."""

Ended = Callable[[LoraRecord, LoraProfile | GiornataError], None]


@dataclass(frozen=True)
class ProfilerLogin:
    """Where the system is, and how the profiler logs in."""

    nats_url: str
    password_file: Path | None = None
    blobs_url: str | None = None


@dataclass(frozen=True)
class ProfilerSession:
    """A connected profiler. Make it with :func:`connected`."""

    records: LoraRecords
    profiler: LoraProfiler
    served: ServedModels

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
                card = await self._card(record)
                outcome: LoraProfile | GiornataError = await self.profiler.profile(
                    record, card, begin(record)
                )
            except GiornataError as error:
                outcome, whole = error, False
            ended(record, outcome)
        return whole

    async def watch(self, begin: Begin, ended: Ended) -> None:
        """Profile what is due and what comes. It never returns."""
        await LoraProfileWatcher(self.records, self.profiler, self.served, begin, ended).run()

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
