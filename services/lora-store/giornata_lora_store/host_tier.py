"""The host tier of a LoRA store: files in a fast folder of its machine, loaded on demand first, then by plan."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import nats.errors
import structlog
from nats.js.errors import APIError

from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint
from giornata.deadlines import heed_cancel
from giornata.lora_files import TIER_NAME, WHOLE_FILES, WHOLE_MS
from giornata.records import LoraRecords
from giornata.residency.tiers import PART, FolderTier, LoadTokenBucket
from giornata.wire import codec, subjects
from giornata.wire.errors import (
    Failed,
    GiornataError,
    LoraNotFound,
    LoraNotReady,
    LoraPinsFull,
    LoraTooLarge,
    LoraUnreadable,
    SchemaMismatch,
    ServiceUnavailable,
)
from giornata.wire.loras import (
    MESSAGE_BYTES,
    MOST_FILES,
    TOLD_CHANGES,
    HostTier,
    LoraRecord,
    LoraState,
    PinLora,
    TierChange,
    TierLoadReply,
    TierLoadRequest,
    TierLoads,
    TierSnapshot,
    TierSnapshotRequest,
    WantedFiles,
)
from giornata.wire.workers import ServiceState
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.files import LoraFiles

DIGEST: Final = re.compile(r"[0-9a-f]{64}")
PIECE_BYTES: Final = 4 << 20
"""What is copied at a time."""
AGAIN_S: Final = 1.0
"""Pause before a bucket that cannot be followed is followed again."""

log = structlog.get_logger(__name__)


class HostTierFolder(FolderTier):
    """Whole files by their sha-256, in a folder that this process alone fills; its changes are numbered.

    Files that the plan wants go last, the least wanted first, and only for a file on demand. Files that the catalogue
    pins never go. A file that is copied counts from the start. The file `TIER_NAME` tells denoisers which tier it is.

    Raises:
        Failed: another process fills the folder, or it cannot be written.
    """

    def __init__(self, folder: Path, name: str, budget_bytes: int) -> None:
        self.name, self.number = name, 0
        self.wanted: tuple[str, ...] = ()
        """The pinned first, the most wanted first."""
        self._worth_of: dict[str, int] = {}
        self._kept = frozenset[str]()
        """What the catalogue pins."""
        self._coming: set[str] = set()
        self._changes = deque[TierChange](maxlen=TOLD_CHANGES)
        try:
            (folder / WHOLE_FILES).mkdir(parents=True, exist_ok=True)
            self._lock_file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker = folder / f"{TIER_NAME}{PART}"
            marker.write_text(name, encoding="utf-8")
            marker.replace(folder / TIER_NAME)
            super().__init__(folder / WHOLE_FILES, budget_bytes, "", lambda one: self._worth_of.get(one, 0))
        except BlockingIOError as error:
            raise Failed(
                "The host tier's folder is filled by another LoRA store.",
                received=folder,
                accepted="a folder of its own",
            ) from error
        except OSError as error:
            raise Failed(f"The host tier's folder cannot be used: {error}", received=folder) from error
        for digest in self:
            if DIGEST.fullmatch(digest):
                self._note(digest, self.size_of(digest))
            else:
                self._forget(digest)

    def close(self) -> None:
        """Let another process fill it."""
        os.close(self._lock_file)

    def has(self, digest: str) -> bool:
        """Return whether a whole file is here."""
        return digest in self and digest not in self._coming

    def missing(self) -> list[str]:
        """Wanted files that are not here, the most wanted first."""
        return [digest for digest in self.wanted if not self.has(digest)]

    def snapshot(self, epoch: int) -> TierSnapshot:
        """Return what is here, the last used first."""
        held = ((digest, self.size_of(digest) or 0) for digest in reversed(tuple(self)) if self.has(digest))
        return TierSnapshot.of(self.name, epoch, self.number, islice(held, MOST_FILES))

    def changes(self) -> tuple[TierChange, ...]:
        """Changes since the last call, as many as are kept."""
        told = tuple(self._changes)
        self._changes.clear()
        return told

    def want(self, pins: Sequence[str], wanted: Sequence[str]) -> None:
        """From now on the first are pinned, and the others wanted."""
        before, self._kept = self._kept, frozenset(pins)
        for digest in self._kept - before:
            self.pin(digest)
        self.wanted = tuple(dict.fromkeys((*pins, *wanted)))
        self._worth_of = {digest: worth for worth, digest in enumerate(reversed(self.wanted), 1)}
        for digest in before - self._kept:
            self.unpin(digest)

    def fits(self, size_bytes: int) -> bool:
        """Return whether a file can come without a wanted one going."""
        unpinned = set(self.wanted) - self._kept - self._coming
        return size_bytes + sum(self.size_of(digest) or 0 for digest in unpinned) <= self.room_bytes

    @contextmanager
    def receiving(self, digest: str, size_bytes: int) -> Iterator[Path]:
        """A path for a file, which has its room at once, and appears whole when the context ends, or not at all.

        Raises:
            LoraTooLarge: pinned files, and files that come, leave no room for it.
        """
        if size_bytes > self.room_bytes:
            raise LoraTooLarge(
                received=f"{size_bytes} bytes",
                accepted=f"{max(0, self.room_bytes)} that are free on this host",
            )
        with self.pinned(digest):
            self.add(digest, size_bytes)
            self._coming.add(digest)
            try:
                with self.writing(digest) as path:
                    path.chmod(0o644)  # denoisers read it
                    yield path
                self._note(digest, size_bytes)
            except BaseException:
                self._forget(digest)
                raise
            finally:
                self._coming.discard(digest)

    def _release(self, name: str) -> None:
        super()._release(name)
        self._note(name, None)

    def _note(self, digest: str, size_bytes: int | None) -> None:
        self.number += 1
        self._changes.append(TierChange(number=self.number, sha256=digest, size_bytes=size_bytes))


@dataclass
class FileLoad:
    """A file on its way."""

    digest: str
    reason: str
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where a load by plan should look again whether it may go on."""

    @property
    def urgent(self) -> bool:
        """Return whether a job waits, or is about to come."""
        return self.reason != "plan"


class HostTierLoader:
    """Fills one tier. Loads are tasks of `tasks`, so that a question that is given up does not end them."""

    def __init__(
        self, tasks: asyncio.TaskGroup, tier: HostTierFolder, source: LoraFiles, plan_bytes_per_s: float
    ) -> None:
        self._tasks, self._tier, self._source = tasks, tier, source
        self._allowance = LoadTokenBucket(plan_bytes_per_s)
        self._epoch = time.time_ns() // 1000
        self._loads: dict[str, FileLoad] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._counts = Counter[str]()
        self._waited_s = self._copied_s = 0.0
        self._copied_bytes = 0
        self._news = asyncio.Event()
        self._plan: WantedFiles | None = None
        self._pins: tuple[str, ...] = ()

    def endpoints(self, instance: str) -> tuple[Endpoint, ...]:
        """Return what a store with this tier answers beside its own."""
        return (
            Endpoint(subjects.bring(self._tier.name), TierLoadRequest, self.bring),
            Endpoint(subjects.tier(instance), TierSnapshotRequest, self._snapshot, limit_bytes=MESSAGE_BYTES),
        )

    async def bring(self, request: TierLoadRequest) -> TierLoadReply:
        """Have a file in the folder.

        Raises:
            LoraNotFound: the store has no such file.
            LoraTooLarge: there is no room for it beside pinned files.
            LoraUnreadable: the store's file is damaged.
        """
        digest, begun_s, tier = request.file.sha256, time.monotonic(), self._tier
        if not DIGEST.fullmatch(digest):
            raise LoraNotFound(received=digest)
        if request.damaged and tier.has(digest):
            tier.remove(digest)
        if tier.has(digest):
            if not request.ahead:
                tier.use(digest)
            self._counts["hits"] += 1
            with suppress(FileNotFoundError):
                os.utime(tier.path(digest))  # the order that a later process finds
            return TierLoadReply(loaded=False)
        load = self._loads.get(digest) or self._begin(digest, "ahead" if request.ahead else "demand")
        if not request.ahead and not load.urgent:
            load.reason = "demand"
            load.go.set()
        try:
            await asyncio.shield(load.done)
        finally:
            self._waited_s += time.monotonic() - begun_s
        return TierLoadReply(loaded=True)

    async def _snapshot(self, _: TierSnapshotRequest) -> TierSnapshot:
        return self._tier.snapshot(self._epoch)

    def pin(self, pins: tuple[str, ...]) -> None:
        """The catalogue pins these files from now on."""
        self._pins = pins
        self._want()

    def plan(self, value: bytes | None) -> None:
        """Take in what the router's plan wants now, None where it was removed.

        What is unreadable, or older than one before, is ignored, counted and logged.
        """
        known = self._plan
        try:
            plan = None if value is None else codec.decode(WantedFiles, value)
        except (SchemaMismatch, ValueError) as error:
            self._ignore("unreadable", str(error))
            return
        if known is not None and plan is not None and plan.revision <= known.revision:
            if plan.revision < known.revision:
                self._ignore("older", f"{plan.revision} after {known.revision}")
            return
        self._counts["plans"] += plan is not None
        self._plan = plan
        self._want()

    async def run(self, look_s: float) -> None:
        """Bring what is wanted, for ever: at each change, and every `look_s` what demand has pushed out."""
        while True:
            heed_cancel()
            self._news.clear()
            for digest in self._tier.missing():
                if self._news.is_set():
                    break
                await self._bring_planned(digest)
            with suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._news.wait()

    def close(self) -> None:
        """Let go of what is being brought: the store stops."""
        for task in self._running:
            task.cancel()

    def told(self) -> HostTier:
        """Its telemetry."""
        counts, tier = self._counts, self._tier
        return HostTier(
            name=tier.name,
            epoch=self._epoch,
            number=tier.number,
            changes=tier.changes(),
            budget_bytes=tier.budget_bytes,
            used_bytes=tier.size_bytes,
            bytes_per_s=self._copied_bytes / self._copied_s if self._copied_s else 0.0,
            hits=counts["hits"],
            loads=TierLoads(
                demand=counts["demand"],
                ahead=counts["ahead"],
                plan=counts["plan"],
                waited_ms=self._waited_s * 1e3,
            ),
            evicted=tier.evicted,
            failed=counts["failed"],
            plans=counts["plans"],
            plans_ignored=counts["plans_ignored"],
            wanted=len(tier.wanted),
            missing=len(tier.missing()),
        )

    def _want(self) -> None:
        self._tier.want(self._pins, self._plan.digests if self._plan else ())
        self._news.set()

    def _ignore(self, why: str, what: str) -> None:
        self._counts["plans_ignored"] += 1
        log.warning("plan_ignored", why=why, what=what[:200])

    async def _bring_planned(self, digest: str) -> None:
        try:
            load = self._loads.get(digest)
            if load is None:
                size_bytes = (await asyncio.to_thread(self._source.path, digest)).stat().st_size
                if not self._tier.fits(size_bytes):
                    return
                load = self._begin(digest, "plan")
            await asyncio.shield(load.done)
        except (GiornataError, OSError) as error:
            log.info("host_tier_load_failed", digest=digest, error=str(error))

    def _begin(self, digest: str, reason: str) -> FileLoad:
        load = self._loads[digest] = FileLoad(digest, reason)
        task = self._tasks.create_task(self._carry(load), name=f"load-{digest[:12]}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return load

    async def _carry(self, load: FileLoad) -> None:
        """Copy a file; the load's future has what became of it."""
        failed: Exception | None = ServiceUnavailable("This LoRA store is stopping.")
        try:
            path = await asyncio.to_thread(self._source.path, load.digest)
            size_bytes = path.stat().st_size
            if load.reason != "demand" and not self._tier.fits(size_bytes):
                raise LoraTooLarge(received=f"{size_bytes} bytes", accepted="what wanted files leave free")
            with self._tier.receiving(load.digest, size_bytes) as copy:
                await self._copy(path, copy, load)
            failed = None
        except (GiornataError, OSError) as error:
            failed = error
        finally:
            self._end(load, failed)

    async def _copy(self, path: Path, copy: Path, load: FileLoad) -> None:
        total = hashlib.sha256()
        with path.open("rb") as source, copy.open("wb") as target:
            while size_bytes := await asyncio.to_thread(self._piece, source, target, total):
                self._allowance.spend(size_bytes, time.monotonic())
                await self._paced(load)
        if total.hexdigest() != load.digest:
            raise LoraUnreadable(
                "The file in the LoRA store is damaged.", received=total.hexdigest(), accepted=load.digest
            )

    def _piece(self, source: BinaryIO, target: BinaryIO, total: hashlib._Hash) -> int:
        begun_s = time.monotonic()
        data = source.read(PIECE_BYTES)
        total.update(data)
        target.write(data)
        self._copied_bytes += len(data)
        self._copied_s += time.monotonic() - begun_s
        return len(data)

    async def _paced(self, load: FileLoad) -> None:
        """Hold a load that can wait while a job waits for another one, and beyond its bandwidth."""
        while not load.urgent:
            load.go.clear()
            demanded = any(other.urgent for other in self._loads.values())
            wait_s = WHOLE_MS / 1e3 if demanded else self._allowance.wait_s(time.monotonic())
            if not wait_s:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await load.go.wait()

    def _end(self, load: FileLoad, error: Exception | None) -> None:
        del self._loads[load.digest]
        for other in self._loads.values():
            other.go.set()
        self._counts["failed" if error else load.reason] += 1
        if load.done.done():
            return
        if error is None:
            load.done.set_result(None)
        else:
            load.done.set_exception(error)
            load.done.exception()  # also where no one waits


@asynccontextmanager
async def open_host_tier(config: LoraStoreConfig, files: LoraFiles) -> AsyncIterator[HostTierLoader | None]:
    """The host tier that a configuration asks for; None where it asks for none.

    Raises:
        Failed: its folder cannot be used, or is another store's.
    """
    if config.lora_host_folder is None:
        yield None
        return
    budget_bytes = config.cache_disk_mb << 20
    tier = await asyncio.to_thread(
        HostTierFolder, config.lora_host_folder, config.lora_host_name, budget_bytes
    )
    try:
        async with asyncio.TaskGroup() as loads:
            loader = HostTierLoader(loads, tier, files, config.lora_plan_mb_s * (1 << 20))
            try:
                yield loader
            finally:
                loader.close()
    finally:
        tier.close()


async def follow_plan(config: LoraStoreConfig, bus: Bus, loader: HostTierLoader) -> None:
    """Tell the tier of every wanted set of the router, for ever; a bucket that is gone is made again.

    The bucket is opened again every `lora_scan_s`: a watcher does not tell that its bucket was replaced.
    """
    key = subjects.wanted_key(config.lora_host_name)
    while True:
        heed_cancel()
        try:
            watcher = await (await bus.jetstream.key_value(subjects.WANTED)).watch(key)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(config.lora_scan_s):
                        async for entry in watcher:
                            if entry is not None:
                                loader.plan(None if entry.operation is not None else entry.value)
            finally:
                await watcher.stop()  # type: ignore[no-untyped-call]  # nats-py annotates it in part
        except (nats.errors.Error, APIError) as error:
            log.warning("plan_not_followed", error=repr(error))
            await asyncio.sleep(AGAIN_S)  # the server is away; nothing tells of its return
            await _make_buckets(config, bus)


async def _make_buckets(config: LoraStoreConfig, bus: Bus) -> None:
    make = partial(streams.ensure_shared, bus.jetstream, replicas=config.replicas)
    try:
        await make(events_ttl_s=config.result_ttl_s, store_bytes=config.nats_store_bytes)
    except Exception as failed:  # noqa: BLE001 - the task's edge: logged, and tried again
        log.warning("bucket_not_made", error=repr(failed))


class LoraPins:
    """The LoRAs that the catalogue pins, and how many bytes it may: the least budget of the known host tiers."""

    def __init__(self, records: LoraRecords) -> None:
        self._records = records
        self._budgets: dict[str, int] = {}
        """By name of the tier."""
        self._known: dict[str, tuple[str, int]] = {}
        """Digest and bytes by the key of the record."""

    def hear(self, state: ServiceState) -> None:
        """Take in telemetry of a LoRA store."""
        if (tier := state.host_tier) is None:
            return
        if state.draining:
            self._budgets.pop(tier.name, None)
        else:
            self._budgets[tier.name] = tier.budget_bytes

    async def follow(self, told: Callable[[tuple[str, ...]], object]) -> None:
        """Take in every record of a LoRA and every change, for ever; `told` of the pinned files when they change."""
        while True:
            heed_cancel()
            try:
                async for key, record in self._records.bucket.changes(">"):
                    before = self._known.pop(key, None)
                    if record is not None and record.pinned and record.canonical is not None:
                        file = record.canonical.file
                        self._known[key] = file.sha256, file.size_bytes
                    if self._known.get(key) != before:
                        told(tuple(sorted({digest for digest, _ in self._known.values()})))
            except (nats.errors.Error, APIError, SchemaMismatch) as error:
                log.warning("records_not_followed", error=repr(error))
            await asyncio.sleep(AGAIN_S)  # the server is away; nothing tells of its return

    async def pin(self, request: PinLora) -> LoraRecord:
        """Pin a LoRA to every host, or no longer.

        Raises:
            LoraNotFound: there is no such LoRA.
            LoraNotReady: it has no canonical file yet.
            LoraPinsFull: all that is pinned would not fit into a host tier.
        """

        def pinned(known: LoraRecord) -> LoraRecord | None:
            if known.pinned == request.pinned:
                return None
            if request.pinned:
                self._check_room(known)
            return known.model_copy(update={"pinned": request.pinned})

        return await self._records.change(request.tenant, request.lora_id, pinned)

    def _check_room(self, record: LoraRecord) -> None:
        if record.state is not LoraState.READY or record.canonical is None:
            raise LoraNotReady(received=record.state.value, accepted=LoraState.READY.value)
        file = record.canonical.file
        size_bytes = sum((dict(self._known.values()) | {file.sha256: file.size_bytes}).values())
        most = min(self._budgets.values(), default=0)
        if size_bytes > most:
            limit = f"at most {most}, of the smallest host tier"
            raise LoraPinsFull(
                received=f"{size_bytes} bytes of pinned LoRAs",
                accepted=limit if self._budgets else "none: no host tier runs",
            )
