"""The LoRA store: its endpoints, the folder, and what it tells of itself."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import structlog

from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint, state_of, telemetry
from giornata.bus.connection import read_just_made
from giornata.deadlines import heed_cancel
from giornata.records import LoraRecords
from giornata.wire import subjects
from giornata.wire.errors import Failed
from giornata.wire.loras import (
    MESSAGE_BYTES,
    BeginUpload,
    DropUpload,
    FinishUpload,
    KeepUpload,
    LoraCounters,
    LoraState,
    PinLora,
    ProfiledLora,
    ReadFile,
    RemoveLora,
    UploadChunk,
)
from giornata.wire.workers import ServiceName, ServiceState
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.endpoints import LoraStoreEndpoints, SharedFolder
from giornata_lora_store.files import LoraFiles, TenantStorageQuotas, record_files
from giornata_lora_store.host_tier import HostTierLoader, LoraPins, follow_plan, open_host_tier
from giornata_lora_store.validation import LoraSizeLimits, LoraValidator

SWEEP_S: Final = 600.0
"""How often all records are read: for files that no record needs, and for LoRAs that a lost instance has left."""

log = structlog.get_logger(__name__)


class LoraStore:
    """One instance. Make it with :meth:`open`."""

    def __init__(self, config: LoraStoreConfig, bus: Bus, files: LoraFiles, records: LoraRecords) -> None:
        self._config, self._bus, self._files, self._records = config, bus, files, records
        self._validation = LoraValidator(
            bus, records, instance=config.instance, limit_s=config.lora_validation_s
        )
        limits = LoraSizeLimits(config.lora_rank, config.lora_tensors, config.lora_header_bytes)
        shares = self._shares = TenantStorageQuotas(files, records)
        self._intake = LoraStoreEndpoints(records, files, limits, shares, self._validation.add)
        shared = config.lora_shared_folder
        self._shared = None if shared is None else SharedFolder(shared, self._intake)
        self._pins = LoraPins(records)
        self._host: HostTierLoader | None = None
        self._writable = True
        self._used_bytes = 0

    @classmethod
    async def open(cls, config: LoraStoreConfig, bus: Bus) -> LoraStore:
        """The store of a configuration, with its bucket and its folder made.

        Raises:
            Failed: the folder cannot be used.
        """
        await streams.ensure_shared(
            bus.jetstream,
            replicas=config.replicas,
            events_ttl_s=config.result_ttl_s,
            store_bytes=config.nats_store_bytes,
        )
        try:
            files = LoraFiles(
                config.lora_folder, file_bytes=config.lora_file_bytes, total_bytes=config.lora_folder_bytes
            )
            files.check()
        except OSError as error:
            raise Failed(f"The folder of the LoRAs cannot be used: {error}") from error
        if config.lora_shared_folder is not None and not config.lora_shared_folder.is_dir():
            raise Failed("The shared folder of LoRAs is no folder.", received=config.lora_shared_folder)
        return cls(config, bus, files, await read_just_made(partial(LoraRecords.open, bus.jetstream)))

    async def run(self, stop: asyncio.Event) -> None:
        """Answer until `stop`; then say *draining* and finish what was asked."""
        intake = self._intake
        endpoints: tuple[Endpoint, ...] = (
            Endpoint(subjects.lora("begin"), BeginUpload, intake.begin),
            Endpoint(subjects.lora("piece"), UploadChunk, intake.piece),
            Endpoint(subjects.lora("finish"), FinishUpload, intake.finish),
            Endpoint(subjects.lora("keep"), KeepUpload, intake.keep),
            Endpoint(subjects.lora("drop"), DropUpload, intake.drop),
            Endpoint(subjects.lora("read"), ReadFile, intake.read, limit_bytes=MESSAGE_BYTES),
            Endpoint(subjects.lora("remove"), RemoveLora, intake.remove),
            Endpoint(subjects.lora("profiled"), ProfiledLora, intake.profiled),
            Endpoint(subjects.lora("pin"), PinLora, self._pins.pin),
        )
        async with AsyncExitStack() as stack:
            tasks = await stack.enter_async_context(asyncio.TaskGroup())
            await self._sweep()
            host = self._host = await stack.enter_async_context(open_host_tier(self._config, self._files))
            endpoints += host.endpoints(self._config.instance) if host else ()
            for service, hear in (
                (ServiceName.LORA_STORE, self._pins.hear),
                (ServiceName.PREPOST, self._validation.hear),
            ):
                heard = self._bus.listen(subjects.telemetry_of(service), ServiceState, hear)
                await stack.enter_async_context(heard)
            serving = self._bus.serve(ServiceName.LORA_STORE, *endpoints, instance=self._config.instance)
            await stack.enter_async_context(serving)
            await stack.enter_async_context(telemetry(self._bus, self._config.telemetry_hz, self._state))
            works = [
                self._validation.run(self._config.lora_scan_s),
                self._look_after(),
                self._pins.follow(host.pin if host else lambda _: None),
            ]
            if host:
                works += [
                    host.run(self._config.lora_scan_s),
                    follow_plan(self._config, self._bus, host),
                ]
            for work in works:
                stack.callback(tasks.create_task(work).cancel)
            log.info("ready", folder=str(self._config.lora_folder))
            await stop.wait()
            log.info("draining")
        log.info("drained")

    async def _look_after(self) -> None:
        """Look at the folders again and again."""
        swept_s = time.monotonic()
        while True:
            heed_cancel()
            try:
                await self._check()
                if self._shared is not None:
                    await self._shared.look()
                if time.monotonic() - swept_s >= SWEEP_S:
                    await self._sweep()
                    swept_s = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the task's edge: logged, and tried again
                log.warning("look_failed", error=repr(error))
            await asyncio.sleep(self._config.lora_scan_s)

    async def _check(self) -> None:
        """See whether files can be written, and how many bytes there are."""
        try:
            await asyncio.to_thread(self._files.check)
        except OSError as error:
            log.error("folder_not_writable", folder=str(self._config.lora_folder), error=str(error))
            self._writable = False
            return
        self._writable = True
        await self._shares.measure()
        self._used_bytes = await asyncio.to_thread(self._files.used_bytes)

    async def _sweep(self) -> None:
        """Read all records: take up what is unfinished, and remove files and uploads that nobody needs."""
        records = await self._records.all()
        if self._shared is not None:
            await self._shared.know(records)
        for record in records:
            if record.state is LoraState.VALIDATING:
                self._validation.add(record)
        needed = {name for record in records for name in record_files(record)}
        removed = await asyncio.to_thread(
            self._files.sweep,
            needed.__contains__,
            kept_s=self._config.lora_kept_s,
            uploads_s=self._config.lora_upload_s,
        )
        given_up = time.time() - self._config.lora_upload_s
        for record in records:
            if record.state is LoraState.UPLOADING and record.worked_s < given_up:
                await self._records.delete(record)
        if removed:
            log.info("swept", files=len(removed))

    def _state(self) -> ServiceState:
        intake, validation = self._intake, self._validation
        counters = LoraCounters(
            stored_bytes=self._used_bytes,
            limit_bytes=self._config.lora_folder_bytes,
            uploads=intake.uploads,
            finished=intake.finished,
            validating=validation.pending + (self._shared.unread if self._shared else 0),
            ready=validation.ready,
            failed=validation.failed,
            read_bytes=intake.read_bytes,
        )
        tier = self._host and self._host.told()
        return state_of(
            ServiceName.LORA_STORE, self._config, ready=self._writable, loras=counters, host_tier=tier
        )
