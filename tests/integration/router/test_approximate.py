"""The router and similar prompts: what a job leaves, what another begins with, and what the next router knows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from giornata.blobs.memory import MemoryBlobs
from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.records import Records
from giornata.wire import subjects
from giornata.wire.errors import RowPoisoned
from giornata.wire.events import DoneEvent, EventKind
from giornata.wire.jobs import BlobRef, Job, JobState
from giornata.wire.messages import RemoveTemplate, RunRequest
from giornata.wire.progress import JobRecord, KeptLatent
from giornata.wire.queues import PromptCounters
from giornata.wire.requests import Approximate
from giornata.wire.workers import ServiceState
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import INSPECTION, FakePrepost
from tests.fakes.news import News
from tests.integration.conftest import NatsServer
from tests.integration.router.bench import COSTS, Bench, make_job, running_router
from tests.unit.approximate.entries import embedding as told

SOUGHT = told(1, 0, 0, 0)
LIKE = told(0.97, 0.243, 0, 0)
UNLIKE = told(0, 1, 0, 0)
HOUR_MS = 3_600_000


class Kept:
    """A bench with one denoiser whose rows keep latents, in a store that outlives the routers."""

    def __init__(self, bench: Bench, url: str, table: Path) -> None:
        self.bench, self._url = bench, url
        self.blobs = MemoryBlobs()
        self.denoiser = FakeDenoiser(bench.bus, bench.records, "denoiser-a", costs=COSTS)
        self.refs: dict[str, BlobRef] = {}
        self.news, self.told = News(), PromptCounters()
        self._options: dict[str, Any] = {"prompt_cache_table": table, "blobs": self.blobs}

    @asynccontextmanager
    async def router(self, name: str, **more: Any) -> AsyncIterator[None]:
        async with running_router(self._url, name, **self._options, **more):
            yield

    def hear(self, state: ServiceState) -> None:
        if state.prompts is not None and state.active:
            self.told = state.prompts
            self.news.tell()

    def keep(self, request: RunRequest, index: int) -> tuple[KeptLatent, ...]:
        name = f"prompts/{request.job.job_id}-{index}"
        if any(row.index == index and row.resume for row in request.rows):
            return ()
        return tuple(
            KeptLatent(step=step, latents=self.refs[f"{name}-{step}"]) for step in request.keep_after
        )

    async def ended(self, job: Job, embedding: bytes = SOUGHT) -> JobRecord:
        """The record of a job whose prompt has this embedding, and whose rows' latents are in the store."""
        self.bench.prepost.embedding = embedding
        for index in range(job.parameters.n):
            for step in (1, 2, 3, 4, 5):
                name = f"prompts/{job.job_id}-{index}-{step}"
                self.refs[name] = await self.blobs.put(name, b"latent", 600)
        await self.bench.submit(job)
        await self.bench.ended(job)
        return await self.bench.records.get(job.job_id)

    async def until(self, entries: int) -> None:
        await self.news.until(lambda: self.told.entries == entries)


def _fails_finish(verb: str) -> None:
    if verb == "finish":
        raise RowPoisoned


def asking(mode: Approximate = Approximate.AUTO, **fields: Any) -> Job:
    return make_job(approximate=mode, steps=10, **fields)


@pytest.fixture
async def kept(private_nats: NatsServer, tmp_path: Path) -> AsyncIterator[Kept]:
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"tiny": {"thresholds": [{"cosine": 0.9, "share": 0.4}]}}))
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(buses.connect(private_nats.url, "bench"))
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=60)
        bench = Bench(bus, await Records.open(bus.jetstream), FakePrepost(bus))
        bench.prepost.inspection = INSPECTION.model_copy(update={"mask_key": "m"})
        made = Kept(bench, private_nats.url, table)
        made.denoiser.keep = made.keep
        done = subjects.events_of_gateway("gateway-test", EventKind.DONE)
        await stack.enter_async_context(bus.listen(done, DoneEvent, bench.hear))
        await stack.enter_async_context(bus.listen(subjects.ALL_TELEMETRY, ServiceState, made.hear))
        await stack.enter_async_context(bench.prepost.run())
        await stack.enter_async_context(made.denoiser.run())
        yield made


async def test_a_similar_prompt_begins_with_what_an_earlier_job_left(kept: Kept) -> None:
    async with kept.router("router-a"):
        first = await kept.ended(asking())
        assert first.rows[0].approximate is None
        assert (first.rows[0].kept, first.encoding and first.encoding.prompt_embedding) == ((), None)
        await kept.until(entries=1)
        again = await kept.ended(asking(), LIKE)
        (use,) = [row.approximate for row in again.rows]
        assert use is not None
        assert use.step == 4
        assert use.cosine == pytest.approx(0.97, abs=1e-3)
        ran = kept.denoiser.requests[-1].rows[0]
        assert ran.resume is not None
        assert (ran.resume.step, ran.resume.another) == (4, True)
        assert ran.resume.latents.key == f"prompts/{first.job.job_id}-0-4"
        assert again.state is JobState.COMPLETED
        assert await kept.blobs.has(ran.resume.latents), "it is there for others"
        assert (await kept.ended(asking(), UNLIKE)).rows[0].approximate is None
        await kept.news.until(lambda: (kept.told.hits, kept.told.misses) == (1, 2))
        assert kept.told.size_bytes == 2 * 5 * len(b"latent")


async def test_rows_of_a_job_begin_with_different_ones_or_their_own_noise(kept: Kept) -> None:
    async with kept.router("router-a"):
        await kept.ended(asking(n=2))
        await kept.until(entries=2)
        record = await kept.ended(asking(n=3), LIKE)
        used = [row.approximate.entry for row in record.rows if row.approximate]
        assert len(used) == len(set(used)) == 2


@pytest.mark.parametrize(
    "other",
    [{"tenant": "another"}, {"mode": Approximate.OFF}, {"mode": Approximate.DEADLINE, "slo_ms": HOUR_MS}],
    ids=["another tenant's", "one that does not ask", "one that keeps its deadline"],
)
async def test_another_job_does_not(kept: Kept, other: dict[str, Any]) -> None:
    async with kept.router("router-a"):
        await kept.ended(asking())
        await kept.until(entries=1)
        record = await kept.ended(asking(**other))
        assert record.rows[0].approximate is None


async def test_a_deadline_that_would_be_missed_is_reason_enough(kept: Kept) -> None:
    async with kept.router("router-a"):
        await kept.ended(asking())
        await kept.until(entries=1)
        record = await kept.ended(asking(Approximate.DEADLINE, slo_ms=1))
        assert record.rows[0].approximate is not None


async def test_the_next_router_knows_what_the_last_one_kept(kept: Kept) -> None:
    async with kept.router("router-a"):
        await kept.ended(asking())
        await kept.until(entries=1)
    kept.told = PromptCounters()
    async with kept.router("router-b"):
        await kept.until(entries=1)
        assert (await kept.ended(asking(), LIKE)).rows[0].approximate is not None


async def test_a_deleted_template_takes_its_latents_along(kept: Kept) -> None:
    async with kept.router("router-a"):
        first = await kept.ended(asking())
        await kept.until(entries=1)
        removed = RemoveTemplate(tenant="default", template_key=INSPECTION.template_key)
        await kept.bench.bus.publish(subjects.TEMPLATE_REMOVED, removed)
        await kept.until(entries=0)
        assert (await kept.ended(asking(), LIKE)).rows[0].approximate is None
        await kept.until(entries=1)  # that job's own: what was to be deleted before it has been
        gone = [ref for name, ref in kept.refs.items() if first.job.job_id in name]
        assert not any([await kept.blobs.has(ref) for ref in gone])


async def test_without_a_budget_nothing_is_kept(kept: Kept) -> None:
    async with kept.router("router-a", prompt_cache_mb=0):
        await kept.ended(asking())
        assert kept.denoiser.requests[-1].keep_after == ()
        assert (await kept.ended(asking(), LIKE)).rows[0].approximate is None


async def test_what_a_job_without_pictures_kept_is_deleted(kept: Kept) -> None:
    async with kept.router("router-a"):
        kept.denoiser.poisoned = {1}
        kept.bench.prepost.fail = _fails_finish
        record = await kept.ended(asking(n=2))
        assert record.state is JobState.FAILED
        kept.bench.prepost.fail = lambda _verb: None
        await kept.ended(asking())
        await kept.until(entries=1)
        left = [
            name for name, ref in kept.refs.items() if record.job.job_id in name and await kept.blobs.has(ref)
        ]
        assert all("-1-" in name[-4:] for name in left), "row 1 told of none, which end with their time"
