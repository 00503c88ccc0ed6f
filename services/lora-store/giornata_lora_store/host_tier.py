"""The host tier of a LoRA store: brings files to the fast folder of its machine, on demand first, then by plan."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final

import structlog

from giornata.cancellation import heed_cancel
from giornata.lora_transfer import WHOLE_MS
from giornata.residency.allowance import LoadTokenBucket
from giornata.wire.errors import GiornataError, LoraNotFound, LoraTooLarge, LoraUnreadable, ServiceUnavailable
from giornata.wire.host_tiers import (
    MOST_FILES,
    HostTier,
    TierLoadReply,
    TierLoadRequest,
    TierLoads,
    TierSnapshot,
    TierSnapshotRequest,
)
from giornata_lora_store.files import LoraFiles
from giornata_lora_store.host_folder import DIGEST, HostFolder
from giornata_lora_store.host_room import HostTierContents

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
        """What the tier holds."""
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
            log.info("wanted_file_not_brought", digest=digest, error=str(error))

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
