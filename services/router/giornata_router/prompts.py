"""The approximate prompt cache of the active router: its table, its index, and what it does to blobs and records.

Look-ups answer at once. Blobs are renewed and deleted, and entries written for the next router, by one task, in order:
no job waits for them. What is lost on the way costs hits, and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Final

import nats.errors
import structlog

from giornata.approximate import choosing
from giornata.approximate.cache import PromptCache
from giornata.approximate.entries import Gone, Hit, embedding_of, without
from giornata.approximate.key import key_of
from giornata.approximate.steps import kept_steps
from giornata.approximate.table import Tables
from giornata.blobs import BlobStore
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import Encoding, Inspection, Job
from giornata.wire.messages import RemoveTemplate
from giornata.wire.progress import JobRecord, RowRecord
from giornata.wire.prompts import PromptEntry
from giornata.wire.queues import PromptCounters
from giornata_router.config import RouterConfig
from giornata_router.fenced import PromptRecords
from giornata_router.lease import LeaseEndedError

EXPIRE_S: Final = 60.0
"""How often what has ended is looked for."""
WAITING: Final = 4096
"""Changes that wait to be written; more are not waited for."""

Work = Callable[[PromptRecords], Awaitable[None]]

log = structlog.get_logger(__name__)


def tables(file: Path | None) -> Tables:
    """The tables that come with the project and, before them, those of an operator's file."""
    shipped = resources.files("giornata_router") / "prompt_tables.json"
    found = dict(Tables.model_validate_json(shipped.read_text(encoding="utf-8")).root)
    if file is not None:
        found |= Tables.model_validate_json(file.read_text(encoding="utf-8")).root
    return Tables(found)


class Prompts:
    """The cache of a router; of one that does not lead, or whose budget is 0, it is empty."""

    def __init__(self, config: RouterConfig, blobs: BlobStore) -> None:
        self._blobs, self._life_s = blobs, config.prompt_cache_ttl_s
        self._budget_bytes = config.prompt_cache_mb << 20
        self._tables = tables(config.prompt_cache_table)
        self._cache = PromptCache(self._budget_bytes)
        self._work: asyncio.Queue[Work] = asyncio.Queue(WAITING)
        self._hits = self._misses = 0

    @property
    def counters(self) -> PromptCounters:
        """What telemetry tells."""
        return PromptCounters(
            hits=self._hits,
            misses=self._misses,
            evicted=self._cache.evicted,
            entries=len(self._cache),
            size_bytes=self._cache.size_bytes,
        )

    def keep_after(self, job: Job, inspection: Inspection, encoding: Encoding) -> tuple[int, ...]:
        """After which steps workers keep the latents of a job's rows; after none where they could become no entries."""
        if not self._budget_bytes or encoding.prompt_embedding is None or key_of(job, inspection) is None:
            return ()
        return kept_steps(job.denoising_steps)

    def hits(
        self,
        record: JobRecord,
        inspection: Inspection,
        encoding: Encoding,
        rows: Sequence[RowRecord],
        taken: Iterable[Hit] = (),
    ) -> dict[int, Hit]:
        """What some of a job's `rows` may begin with, by index.

        Each takes another entry than all other rows of the job: than those that the record names, and `taken`.
        """
        job, free = record.job, choosing.undecided(rows)
        table = self._tables.of(job.model, job.model_digest)
        key = key_of(job, inspection) if self._budget_bytes and encoding.prompt_embedding else None
        embedding = None if key is None else embedding_of(encoding.prompt_embedding or b"")
        if key is None or embedding is None or not free:
            return {}
        found: list[Hit] = []
        if table is not None:
            others = [row.approximate.entry for row in record.rows if row.approximate]
            others += [hit.entry for hit in taken]
            found = self._cache.find(
                key, embedding, table, job.denoising_steps, time.time(), count=len(free), taken=others
            )
        self._hits += len(found)
        self._misses += len(free) - len(found)
        for hit in found:
            if self._cache.use(hit, time.time() + self._life_s) is not None:
                self._later(partial(self._renew, hit))
        return {row.index: hit for row, hit in zip(free, found, strict=False)}

    def ended(self, before: JobRecord, after: JobRecord) -> None:
        """A job has ended: its rows that have pictures become entries, and what the others kept is deleted."""
        inspection, encoding = before.inspection, before.encoding
        key = None if inspection is None else key_of(before.job, inspection)
        embedding = None if encoding is None else encoding.prompt_embedding
        until_s = time.time() + self._life_s
        entries, others = choosing.entries(before, after, key or "", embedding or b"", until_s)
        if others:
            self._later(partial(self._apply, Gone(tuple(latent.latents for latent in others))))
        for entry in entries:
            self._later(partial(self._add, entry))

    def remove_template(self, request: RemoveTemplate) -> None:
        """A template was deleted: entries of its picture go along."""
        self._later(partial(self._remove, request))

    async def run(self, records: PromptRecords) -> None:
        """Take in what earlier routers have left; then write what changes. For ever, while this router leads."""
        self._cache = PromptCache(self._budget_bytes)
        await self._tried(self._load, records)
        due_s = time.monotonic() + EXPIRE_S
        while True:
            try:
                async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                    work: Work = await self._work.get()
            except TimeoutError:
                due_s = time.monotonic() + EXPIRE_S
                work = partial(self._apply, self._cache.expire(time.time()))
            await self._tried(work, records)

    def _later(self, work: Work) -> None:
        try:
            self._work.put_nowait(work)
        except asyncio.QueueFull:  # blobs end with their time, and entries with their blobs
            log.warning("prompt_cache_behind", waiting=WAITING)

    async def _tried(self, work: Work, records: PromptRecords) -> None:
        try:
            await work(records)
        except (GiornataError, nats.errors.Error, LeaseEndedError) as error:
            log.warning("prompt_cache_change_lost", error=repr(error))

    async def _load(self, records: PromptRecords) -> None:
        if not self._budget_bytes:
            return
        found = await records.everything()
        for entry in sorted(found, key=lambda each: each.until_s):
            await self._apply(self._cache.add(entry, time.time()), records)
            await asyncio.sleep(0)  # thousands of them are added while jobs are carried
        log.info("prompt_cache_taken_over", entries=len(self._cache))

    async def _add(self, entry: PromptEntry, records: PromptRecords) -> None:
        renewed = [await self._blobs.renew(latent.latents, self._life_s) for latent in entry.kept]
        left = without(
            entry, [each.step for each, there in zip(entry.kept, renewed, strict=True) if not there]
        )
        if left.kept:
            gone = self._cache.add(left, time.time())
            if left.entry_id not in gone.ended:
                await records.put(left)
            await self._apply(gone, records)

    async def _renew(self, hit: Hit, records: PromptRecords) -> None:
        if not await self._blobs.renew(hit.latents, self._life_s):
            await self._apply(self._cache.lose(hit.entry, hit.step), records)

    async def _remove(self, request: RemoveTemplate, records: PromptRecords) -> None:
        await self._apply(self._cache.remove_template(request.tenant, request.template_key), records)

    async def _apply(self, gone: Gone, records: PromptRecords) -> None:
        for entry in gone.changed:
            await records.put(entry)
        for entry_id in gone.ended:
            await records.delete(entry_id)
        if gone.latents:
            await self._blobs.delete(*gone.latents)
