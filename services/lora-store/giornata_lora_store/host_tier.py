"""The host tier of a LoRA store: files in a fast folder of its machine, loaded on demand first, then by plan."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from giornata.bus import streams
from giornata.bus.bus import Bus, Endpoint
from giornata.deadlines import heed_cancel
from giornata.lora_transfer import TIER_NAME, WHOLE_FILES, WHOLE_MS
from giornata.records import LoraRecords
from giornata.residency.tiers import EvictionLedger, LoadTokenBucket
from giornata.wire import subjects
from giornata.wire.errors import (
    Failed,
    GiornataError,
    LoraNotFound,
    LoraTooLarge,
    LoraUnreadable,
    ServiceUnavailable,
)
from giornata.wire.loras import (
    MESSAGE_BYTES,
    MOST_FILES,
    TOLD_CHANGES,
    HostTier,
    LoraRecord,
    TierChange,
    TierLoadReply,
    TierLoadRequest,
    TierLoads,
    TierSnapshot,
    TierSnapshotRequest,
)
from giornata_lora_store.config import LoraStoreConfig
from giornata_lora_store.files import LoraFiles
from giornata_lora_store.host_tier_plan import HostTierPlan, LoraPins, follow_plan, follow_records

# The folder of a host tier: whole files by their sha-256, filled by one store. Blocking.
#
# A file appears by renaming, once it is whole, and is never written again. The file `TIER_NAME` tells the
# denoisers of the machine which tier it is.


PART: Final = ".part"
"""Ends the names of files that are being copied."""
DIGEST: Final = re.compile(r"[0-9a-f]{64}")


class HostFolder:
    """A folder that this process alone fills; it is made.

    Raises:
        Failed: another process fills it, or it cannot be written.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._files = folder / WHOLE_FILES
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            marker = folder / f"{TIER_NAME}{PART}"
            marker.write_text(name, encoding="utf-8")
            marker.replace(folder / TIER_NAME)
            for path in self._files.glob(f"*{PART}"):
                path.unlink(missing_ok=True)
        except BlockingIOError as error:
            raise Failed(
                "The host tier's folder is filled by another LoRA store.",
                received=folder,
                accepted="a folder of its own",
            ) from error
        except OSError as error:
            raise Failed(f"The host tier's folder cannot be used: {error}", received=folder) from error

    def close(self) -> None:
        """Let another process fill it."""
        os.close(self._lock)

    def found(self) -> list[tuple[str, int]]:
        """Digest and bytes of each file that an earlier process left, the oldest use first."""
        known = [(path, path.stat()) for path in self._files.iterdir() if DIGEST.fullmatch(path.name)]
        return [(path.name, stat.st_size) for path, stat in sorted(known, key=lambda one: one[1].st_mtime)]

    def part(self, digest: str) -> Path:
        """Return where a file is copied to."""
        return self._files / f"{digest}{PART}"

    def appear(self, digest: str) -> None:
        """The part of this digest is whole."""
        self.part(digest).replace(self._files / digest)

    def used(self, digest: str) -> None:
        """Note a use, for the order that a later process finds."""
        os.utime(self._files / digest)

    def remove(self, digest: str) -> None:
        """Let go of a file; readers that have opened it read on."""
        (self._files / digest).unlink(missing_ok=True)


# What a host tier holds: bytes, wanted files that others do not push out, and its numbered changes.


class HostTierContents:
    """The books of a tier.

    Files that the plan wants stay while files come ahead or by plan. A file on demand takes their place, least wanted
    first, where nothing else can go. Files that the catalogue pins never go.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.number = 0
        self.evicted = 0
        self._ledger = EvictionLedger(budget_bytes)
        self._whole: dict[str, int] = {}
        self._changes = deque[TierChange](maxlen=TOLD_CHANGES)
        self._pins: tuple[str, ...] = ()
        self._wanted: tuple[str, ...] = ()
        """The pinned first, the most wanted first."""
        self._guarded: set[str] = set()
        """Wanted files that have a pin in the ledger."""

    @property
    def used_bytes(self) -> int:
        """Bytes of what is here or comes."""
        return self._ledger.size_bytes

    @property
    def wanted(self) -> tuple[str, ...]:
        """Return what the catalogue pins, then what the plan wants."""
        return self._wanted

    def __contains__(self, digest: object) -> bool:
        return digest in self._whole

    def held(self) -> Iterator[tuple[str, int]]:
        """Digest and bytes of whole files, the last used first."""
        return (
            (digest, self._whole[digest]) for digest in reversed(tuple(self._ledger)) if digest in self._whole
        )

    def changes(self) -> tuple[TierChange, ...]:
        """Changes since the last call, as many as are kept."""
        told = tuple(self._changes)
        self._changes.clear()
        return told

    def missing(self) -> list[str]:
        """Wanted files that are not here, the most wanted first."""
        return [digest for digest in self._wanted if digest not in self._whole]

    def want(self, pins: Sequence[str], wanted: Sequence[str]) -> list[str]:
        """From now on these are pinned, and these wanted; returns files that have to go."""
        self._pins = tuple(pins)
        self._wanted = tuple(dict.fromkeys((*pins, *wanted)))
        return self.guard()

    def guard(self) -> list[str]:
        """Guard all that is wanted, also what has made room for demand; returns files that have to go."""
        gone = list[str]()
        for digest in self._guarded.difference(self._wanted):
            gone += self._gone(self._ledger.unpin(digest))
        for digest in self._wanted:
            if digest not in self._guarded:
                self._ledger.pin(digest)
        self._guarded = set(self._wanted)
        return gone

    def use(self, digest: str) -> bool:
        """A job needs a file; whether it is here."""
        self._ledger.use(digest)
        return digest in self._whole

    def fits(self, size_bytes: int) -> bool:
        """Return whether a file can come without a wanted one going."""
        return size_bytes <= self._ledger.room_bytes

    def enter(self, digest: str, size_bytes: int) -> list[str]:
        """Make room for a file that comes, and keep it from now on until :meth:`leave`; returns files that have to go.

        Raises:
            LoraTooLarge: pinned files, and files that come, leave no room for it.
        """
        gone = list[str]()
        for digest_of_less in reversed(self._wanted[len(self._pins) :]):
            if self.fits(size_bytes):
                break
            if digest_of_less in self._guarded and digest_of_less != digest:
                self._guarded.discard(digest_of_less)
                gone += self._gone(self._ledger.unpin(digest_of_less))
        if not self.fits(size_bytes):
            room_bytes = max(0, self._ledger.room_bytes)
            raise LoraTooLarge(
                received=f"{size_bytes} bytes", accepted=f"{room_bytes} that are free on this host"
            )
        self._ledger.pin(digest)
        return gone + self._gone(self._ledger.add(digest, size_bytes))

    def leave(self, digest: str, size_bytes: int | None) -> list[str]:
        """A file that came is whole, of so many bytes, or failed: None; returns files that have to go."""
        if size_bytes is None:
            self._ledger.remove(digest)
        else:
            self._whole[digest] = size_bytes
            self._change(digest, size_bytes)
        return self._gone(self._ledger.unpin(digest))

    def drop(self, digest: str) -> bool:
        """Forget a damaged file; whether it was here."""
        self._ledger.remove(digest)
        return bool(self._left((digest,)))

    def take_over(self, found: Iterable[tuple[str, int]]) -> list[str]:
        """Enter files of an earlier process, the oldest use first; returns files that have to go."""
        gone = list[str]()
        for digest, size_bytes in found:
            if size_bytes > self.budget_bytes:
                gone.append(digest)
                continue
            left = self._ledger.add(digest, size_bytes)
            self._whole[digest] = size_bytes
            self._change(digest, size_bytes)
            gone += self._gone(left)
        return gone

    def _gone(self, digests: Iterable[str]) -> list[str]:
        left = self._left(digests)
        self.evicted += len(left)
        return left

    def _left(self, digests: Iterable[str]) -> list[str]:
        left = [digest for digest in digests if self._whole.pop(digest, None) is not None]
        for digest in left:
            self._change(digest, None)
        return left

    def _change(self, digest: str, size_bytes: int | None) -> None:
        self.number += 1
        self._changes.append(TierChange(number=self.number, sha256=digest, size_bytes=size_bytes))


# The host tier of a LoRA store: brings files to the fast folder of its machine, on demand first, then by
# plan.


PIECE_BYTES: Final = 4 << 20
"""What is copied at a time."""

log = structlog.get_logger(__name__)


@dataclass
class _FileLoad:
    """A file on its way."""

    digest: str
    reason: str
    begun_s: float
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    go: asyncio.Event = field(default_factory=asyncio.Event)
    """Set where a load by plan should look again whether it may go on."""

    @property
    def urgent(self) -> bool:
        return self.reason != "plan"


class HostTierLoader:
    """One tier. Loads are tasks of `tasks`, so that a question that is given up does not end them."""

    def __init__(
        self,
        tasks: asyncio.TaskGroup,
        folder: HostFolder,
        source: LoraFiles,
        budget_bytes: int,
        plan_bytes_per_s: float,
    ) -> None:
        self._tasks, self._folder, self._source = tasks, folder, source
        self._room = HostTierContents(budget_bytes)
        self._allowance = LoadTokenBucket(plan_bytes_per_s)
        self._epoch = time.time_ns() // 1000
        self._loads: dict[str, _FileLoad] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._counts = Counter[str]()
        self._waited_s = self._copied_s = 0.0
        self._copied_bytes = 0
        self._news = asyncio.Event()
        self._remove(self._room.take_over(folder.found()))

    @property
    def name(self) -> str:
        """Name of the tier."""
        return self._folder.name

    @property
    def budget_bytes(self) -> int:
        """Most bytes of its files."""
        return self._room.budget_bytes

    async def bring(self, request: TierLoadRequest) -> TierLoadReply:
        """Have a file in the folder.

        Raises:
            LoraNotFound: the store has no such file.
            LoraTooLarge: there is no room for it beside pinned files.
            LoraUnreadable: the store's file is damaged.
        """
        digest, begun_s = request.file.sha256, time.monotonic()
        if not DIGEST.fullmatch(digest):
            raise LoraNotFound(received=digest)
        if request.damaged and self._room.drop(digest):
            self._folder.remove(digest)
        if self._room.use(digest) if not request.ahead else digest in self._room:
            self._counts["hits"] += 1
            with suppress(FileNotFoundError):
                self._folder.used(digest)
            return TierLoadReply(loaded=False)
        reason = "ahead" if request.ahead else "demand"
        load = self._loads.get(digest) or self._begin(digest, reason)
        if not request.ahead and not load.urgent:
            load.reason = "demand"
            load.go.set()
        try:
            await asyncio.shield(load.done)
        finally:
            self._waited_s += time.monotonic() - begun_s
        return TierLoadReply(loaded=True)

    async def snapshot(self, _: TierSnapshotRequest) -> TierSnapshot:
        """Return what the tier holds."""
        return TierSnapshot.of(
            self.name, self._epoch, self._room.number, islice(self._room.held(), MOST_FILES)
        )

    def want(self, pins: Sequence[str], wanted: Sequence[str]) -> None:
        """Pin these files and bring those that the plan wants, when nothing is asked for."""
        self._remove(self._room.want(pins, wanted))
        self._news.set()

    async def run(self, look_s: float) -> None:
        """Bring what is wanted, for ever: at each change, and every `look_s` what demand has pushed out."""
        while True:
            heed_cancel()
            self._news.clear()
            self._remove(self._room.guard())
            for digest in self._room.missing():
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

    def told(self, plans: int, plans_ignored: int) -> HostTier:
        """Its telemetry."""
        counts = self._counts
        return HostTier(
            name=self.name,
            epoch=self._epoch,
            number=self._room.number,
            changes=self._room.changes(),
            budget_bytes=self._room.budget_bytes,
            used_bytes=self._room.used_bytes,
            bytes_per_s=self._copied_bytes / self._copied_s if self._copied_s else 0.0,
            hits=counts["hits"],
            loads=TierLoads(
                demand=counts["demand"],
                ahead=counts["ahead"],
                plan=counts["plan"],
                waited_ms=self._waited_s * 1e3,
            ),
            evicted=self._room.evicted,
            failed=counts["failed"],
            plans=plans,
            plans_ignored=plans_ignored,
            wanted=len(self._room.wanted),
            missing=len(self._room.missing()),
        )

    async def _bring_planned(self, digest: str) -> None:
        try:
            load = self._loads.get(digest)
            if load is None:
                size_bytes = (await asyncio.to_thread(self._source.path, digest)).stat().st_size
                if not self._room.fits(size_bytes):
                    return
                load = self._begin(digest, "plan")
            await asyncio.shield(load.done)
        except (GiornataError, OSError) as error:
            log.info("host_tier_load_failed", digest=digest, error=str(error))

    def _begin(self, digest: str, reason: str) -> _FileLoad:
        load = self._loads[digest] = _FileLoad(digest, reason, time.monotonic())
        task = self._tasks.create_task(self._carry(load), name=f"load-{digest[:12]}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return load

    async def _carry(self, load: _FileLoad) -> None:
        """Copy a file; the load's future has what became of it."""
        digest, size_bytes = load.digest, None
        try:
            path = await asyncio.to_thread(self._source.path, digest)
            size_bytes = path.stat().st_size
            if load.reason != "demand" and not self._room.fits(size_bytes):
                raise LoraTooLarge(received=f"{size_bytes} bytes", accepted="what wanted files leave free")
            self._remove(self._room.enter(digest, size_bytes))
        except (GiornataError, OSError) as error:
            self._end(load, error)
            return
        failed: Exception | None = ServiceUnavailable("This LoRA store is stopping.")
        try:
            await self._copy(path, load)
            self._folder.appear(digest)
            failed = None
        except (GiornataError, OSError) as error:
            failed = error
        finally:
            if failed is not None:
                self._folder.part(digest).unlink(missing_ok=True)
            self._remove(self._room.leave(digest, None if failed else size_bytes))
            self._end(load, failed)

    async def _copy(self, path: Path, load: _FileLoad) -> None:
        total = hashlib.sha256()
        with path.open("rb") as source, self._folder.part(load.digest).open("wb") as target:
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

    async def _paced(self, load: _FileLoad) -> None:
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

    def _end(self, load: _FileLoad, error: Exception | None) -> None:
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

    def _remove(self, gone: Iterable[str]) -> None:
        for digest in gone:
            self._folder.remove(digest)


# The host tier within a store: opened with its folder, told of plans and pins, and closed with the store.


class HostTierService:
    """The part of a store that serves its host tier. Make it with :func:`hosting`."""

    def __init__(self, config: LoraStoreConfig, bus: Bus, desk: HostTierLoader, pins: LoraPins) -> None:
        self._config, self._bus, self._desk, self._pins = config, bus, desk, pins
        self._plan = HostTierPlan()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """Return what it answers."""
        return (
            Endpoint(subjects.bring(self._desk.name), TierLoadRequest, self._desk.bring),
            Endpoint(
                subjects.tier(self._config.instance),
                TierSnapshotRequest,
                self._desk.snapshot,
                limit_bytes=MESSAGE_BYTES,
            ),
        )

    def told(self) -> HostTier:
        """Telemetry."""
        return self._desk.told(self._plan.taken, self._plan.ignored)

    def repin(self) -> None:
        """Pins, or the plan, have changed."""
        self._desk.want(self._pins.digests(), self._plan.wanted())

    async def run(self) -> None:
        """Follow the plan, and bring what they want, for ever."""
        config = self._config
        made = partial(
            streams.ensure_shared,
            self._bus.jetstream,
            replicas=config.replicas,
            events_ttl_s=config.result_ttl_s,
            store_bytes=config.nats_store_bytes,
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                follow_plan(self._bus.jetstream, self._desk.name, self._take, made, config.lora_scan_s),
                name="plan",
            )
            tasks.create_task(self._desk.run(config.lora_scan_s), name="bring")

    def _take(self, value: bytes | None) -> None:
        if self._plan.take(value):
            self.repin()


@asynccontextmanager
async def open_host_tier(
    config: LoraStoreConfig, bus: Bus, files: LoraFiles, pins: LoraPins
) -> AsyncIterator[HostTierService | None]:
    """The host tier that a configuration asks for; None where it asks for none.

    Raises:
        Failed: its folder cannot be used, or is another store's.
    """
    if config.lora_host_folder is None:
        yield None
        return
    folder = await asyncio.to_thread(HostFolder, config.lora_host_folder, config.lora_host_name)
    try:
        async with asyncio.TaskGroup() as loads:
            desk = HostTierLoader(
                loads, folder, files, config.cache_disk_mb << 20, config.lora_plan_mb_s * (1 << 20)
            )
            try:
                yield HostTierService(config, bus, desk, pins)
            finally:
                desk.close()
    finally:
        folder.close()


async def follow_pins(records: LoraRecords, pins: LoraPins, hosting: HostTierService | None) -> None:
    """Tell `pins` of every record, and the host tier of every change of them, for ever."""

    def take(key: str, record: LoraRecord | None) -> None:
        if pins.take(key, record) and hosting is not None:
            hosting.repin()

    await follow_records(records, take)
