"""LoRAs on their way from a whole source to a canonical file: who works on which, and what becomes of it.

Tenants take turns, and each has one LoRA with prepost at a time: another tenant's waits behind one of them at most.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

import structlog

from giornata.bus.bus import Bus
from giornata.deadlines import Deadline, heed_cancel
from giornata.fleet import Fleet
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.errors import DeadlineExceeded, GiornataError, InternalError, LoraNotFound
from giornata.wire.loras import CanonicalLora, LoraRecord, LoraState, NormaliseLora
from giornata.wire.workers import ServiceState

AT_ONCE: Final = 2
"""LoRAs that an instance has with prepost at a time, each of another tenant."""
TRIES: Final = 2
"""A LoRA that prepost fails at unexpectedly so often is failed: its file may be made to do so."""
RENEWED_S: Final = 5.0
LOST_S: Final = 20.0
"""How often an instance says that it works on a LoRA, and after how long without that another one takes it over."""
LEAVING_S: Final = 2.0
"""How long an instance that leaves tries to say so."""

log = structlog.get_logger(__name__)


class LoraValidator:
    """The LoRAs that this instance knows to be unfinished. Used from one event loop; run :meth:`run` once."""

    def __init__(self, bus: Bus, records: LoraRecords, *, instance: str, limit_s: float) -> None:
        self._bus, self._records, self._instance = bus, records, instance
        self._limit_s = limit_s
        self._pending: dict[tuple[str, str], None] = {}
        """Tenants and ids, in order."""
        self._waiting: dict[str, dict[str, None]] = {}
        """Ids of LoRAs that wait for their check, by tenant; the first of a tenant may be with prepost."""
        self._turns: asyncio.Queue[str] = asyncio.Queue()
        """Tenants with LoRAs that wait and none with prepost: each is here once, so they take turns."""
        self._preposts = Fleet()
        self._arrivals = 0
        """How often a prepost has become ready."""
        self._unexpected: Counter[tuple[str, str]] = Counter()
        """Unexpected failures of LoRAs that are not settled."""
        self.ready = 0
        self.failed = 0

    @property
    def pending(self) -> int:
        """LoRAs that are not settled, as far as this instance knows."""
        return len(self._pending)

    def add(self, record: LoraRecord) -> None:
        """Validate a LoRA soon."""
        self._enqueue((record.tenant, record.lora_id))

    def hear(self, state: ServiceState) -> None:
        """Take in telemetry of a prepost. One that becomes ready is asked at once for all that waits."""
        now = time.monotonic()
        self._preposts.expire(now)
        known = self._preposts.get(state.instance)
        self._preposts.observe(state, now)
        if state.ready and not (known and known.ready):
            self._arrivals += 1
            self._enqueue_all()

    async def run(self, pause_s: float) -> None:
        """Validate what is added; what no prepost has answered is tried again after `pause_s`. It never returns."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(AT_ONCE):
                tasks.create_task(self._work(), name=f"validation-{number}")
            while True:
                await asyncio.sleep(pause_s)
                self._enqueue_all()

    def _enqueue_all(self) -> None:
        for key in self._pending:
            self._enqueue(key)

    def _enqueue(self, key: tuple[str, str]) -> None:
        tenant, lora_id = key
        self._pending[key] = None
        if tenant not in self._waiting:
            self._waiting[tenant] = {}
            self._turns.put_nowait(tenant)
        self._waiting[tenant].setdefault(lora_id)

    async def _work(self) -> None:
        while True:
            heed_cancel()
            tenant, arrivals = await self._turns.get(), self._arrivals
            own = self._waiting[tenant]
            key = tenant, next(iter(own))
            try:
                if await self._settled(*key):
                    self._pending.pop(key, None)
                    self._unexpected.pop(key, None)
            except Exception as error:  # noqa: BLE001 - the task's edge: logged, and tried again
                log.warning("lora_validation_again", lora=key[1], error=repr(error))
            finally:
                del own[key[1]]
                if key in self._pending and arrivals != self._arrivals:
                    self._enqueue(key)  # a prepost came while another was asked
                if own:
                    self._turns.put_nowait(tenant)
                else:
                    del self._waiting[tenant]

    async def _settled(self, tenant: str, lora_id: str) -> bool:
        """Validate one LoRA, unless another instance does. Whether nothing is left to do for it.

        An instance that leaves meanwhile lets go of it, so that another one need not wait.
        """
        try:
            record = await self._records.change(tenant, lora_id, self._claimed)
            if record.state is LoraState.VALIDATING and record.worker == self._instance:
                async with self._working(record):
                    record = await self._settle(record)
        except LoraNotFound:  # it was deleted
            return True
        except asyncio.CancelledError:
            with suppress(LoraNotFound, TimeoutError):
                async with asyncio.timeout(LEAVING_S):
                    await self._records.change(tenant, lora_id, self._released)
            raise
        return record.state is not LoraState.VALIDATING

    async def _settle(self, record: LoraRecord) -> LoraRecord:
        deadline = Deadline.after_ms(self._limit_s * 1000)
        request = NormaliseLora(lora=record, remaining_ms=deadline.remaining_ms())
        subject = subjects.prepost("adapter", record.model or "")
        try:
            canonical = await self._bus.call(subject, request, CanonicalLora, deadline)
        except GiornataError as error:
            key = (record.tenant, record.lora_id)
            self._unexpected[key] += isinstance(error, InternalError)
            if self._unexpected[key] >= TRIES:
                error = InternalError(
                    "Reading the LoRA has failed unexpectedly, twice. The log of prepost tells why."
                )
            elif error.retryable or isinstance(error, DeadlineExceeded):
                log.info("lora_waits_for_prepost", lora=record.lora_id, model=record.model, error=str(error))
                return await self._records.change(record.tenant, record.lora_id, self._released)
            self.failed += 1
            log.info("lora_failed", lora=record.lora_id, code=error.code, error=str(error))
            news = {"state": LoraState.FAILED, "error": error.body()}
        else:
            self.ready += 1
            log.info("lora_ready", lora=record.lora_id, rank=canonical.rank, modules=canonical.modules)
            news = {"state": LoraState.READY, "canonical": canonical, "joins_within": None, "error": None}
        return await self._records.change(
            record.tenant,
            record.lora_id,
            lambda now: now.model_copy(update=news) if now.state is LoraState.VALIDATING else None,
        )

    @asynccontextmanager
    async def _working(self, record: LoraRecord) -> AsyncIterator[None]:
        """Say every few seconds that this instance works on a LoRA."""

        async def renew() -> None:
            while True:
                heed_cancel()
                await asyncio.sleep(RENEWED_S)
                with suppress(LoraNotFound):
                    await self._records.change(record.tenant, record.lora_id, self._worked)

        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(renew(), name=f"renew-{record.lora_id}")
            try:
                yield
            finally:
                task.cancel()

    def _claimed(self, record: LoraRecord) -> LoraRecord | None:
        """The record with this instance at work on it; None where another one is, or nothing is left to do."""
        others = record.worker not in {None, self._instance} and time.time() - record.worked_s < LOST_S
        return None if others else self._worked(record, worker=self._instance)

    def _worked(self, record: LoraRecord, **changed: object) -> LoraRecord | None:
        """The record with the present time, so that no other instance takes it over."""
        if record.state is not LoraState.VALIDATING:
            return None
        return record.model_copy(update={"worked_s": int(time.time()), **changed})

    def _released(self, record: LoraRecord) -> LoraRecord | None:
        """The record with no instance at work on it, if it was this one."""
        if record.state is not LoraState.VALIDATING or record.worker != self._instance:
            return None
        return record.model_copy(update={"worker": None})
