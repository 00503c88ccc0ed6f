"""Registered templates at the denoiser: recorded on demand, at first sight elsewhere, prefetched, removed."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import pytest

from giornata.deadlines import Deadline
from giornata.planning.plans import plan_each_alone, uniform_modes
from giornata.records import TemplateRecords
from giornata.wire import subjects, templates
from giornata.wire.jobs import picture_id
from giornata.wire.messages import (
    PrefetchTemplate,
    RecordRequest,
    RemoveTemplate,
    RunAnswer,
    RunReply,
    RunRequest,
)
from giornata.wire.templates import TemplateInputs, TemplateRecord, TemplateState
from giornata.wire.values import BlockMode
from giornata.wire.workers import TemplateCounters, Tier
from giornata_denoiser import startup
from tests.integration.denoiser.bench import INSPECTION, REF, WAIT_S, Bench, Worker
from tests.patience import HUNG_MS
from tests.present import present


class Registry:
    """A registered template of the bench's one picture, and its edits."""

    def __init__(self, bench: Bench, records: TemplateRecords, record: TemplateRecord) -> None:
        self.bench, self.records, self.record = bench, records, record

    @classmethod
    async def open(cls, bench: Bench) -> Registry:
        card = bench.checkpoint.card
        record = TemplateRecord(
            template_id=f"template_{secrets.token_hex(8)}",
            tenant=f"tenant-{secrets.token_hex(4)}",
            model=card.name,
            model_digest=card.digest,
            size="auto",
            image=REF,
            created_s=1,
            expires_s=2,
        )
        records = await TemplateRecords.open(bench.bus.jetstream)
        assert await records.create(record)
        return cls(bench, records, record)

    async def ask(self, worker: Worker, **inputs: Any) -> RunAnswer:
        """Have `worker` record it."""
        encoding = (await self.request(worker)).encoding
        made = TemplateInputs(
            inspection=INSPECTION, empty_text=present(encoding.empty_text), conditioning=encoding.rows[0]
        ).model_copy(update=inputs)
        request = RecordRequest(template=self.record, inputs=made, remaining_ms=HUNG_MS)
        deadline = Deadline.after_ms(HUNG_MS)
        reply = await self.bench.bus.call(
            subjects.worker(worker.instance, "record"), request, RunReply, deadline
        )
        return reply.answer

    async def settled(self) -> TemplateRecord:
        record = self.record
        deadline = Deadline.after_ms(WAIT_S * 1000)
        found = await self.records.until(
            record.tenant, record.template_id, lambda known: known.state.settled, deadline
        )
        assert found.state.settled
        return found

    async def edited(self, worker: Worker, *, registered: bool = True) -> tuple[int | None, str | None]:
        """Tokens that an edit computed, and what the template did for it."""
        request = await self.request(worker)
        if registered:
            job = request.job.model_copy(update={"template_id": self.record.template_id})
            request = request.model_copy(update={"job": job})
        assert await self.bench.run(worker, request) is RunAnswer.ACCEPTED
        await self.bench.report()
        (row,) = (await self.bench.records.get(request.job.job_id)).rows
        return row.computed_tokens, row.template

    async def prefetch(self, worker: Worker) -> None:
        request = await self.request(worker)
        message = PrefetchTemplate(job=request.job, inspection=INSPECTION)
        await self.bench.bus.publish(subjects.worker(worker.instance, "prefetch"), message)

    async def remove(self) -> None:
        message = RemoveTemplate(tenant=self.record.tenant, template_key=INSPECTION.template_key)
        await self.bench.bus.publish(subjects.TEMPLATE_REMOVED, message)

    async def counters(self, worker: Worker, **wanted: int) -> TemplateCounters:
        """The worker's telemetry once it tells `wanted`."""
        async with asyncio.timeout(WAIT_S):
            while True:
                state = await self.bench.states.get()
                told = state.worker and state.worker.templates
                if told and state.instance == worker.instance and wanted.items() <= told.model_dump().items():
                    return told

    async def resident(self, worker: Worker, tier: Tier) -> None:
        """Until the worker's telemetry tells that the picture's template is in a tier."""
        picture = picture_id(self.record.tenant, INSPECTION.template_key)
        async with asyncio.timeout(WAIT_S):
            while True:
                state = await self.bench.states.get()
                told = (state.worker.resident or {}).get(tier, ()) if state.worker else ()
                if state.instance == worker.instance and picture in told:
                    return

    async def request(self, worker: Worker) -> RunRequest:
        return await self.bench.job(worker, painted=[0], reuse="auto", halo=0, tenant=self.record.tenant)


def files_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


@pytest.fixture
async def registry(bench: Bench) -> Registry:
    return await Registry.open(bench)


@pytest.mark.parametrize("policy", ["background", "inline", "off"])
async def test_a_registered_template_is_recorded_before_its_first_edit(
    bench: Bench, registry: Registry, policy: str
) -> None:
    async with bench.worker(template_policy=policy) as worker:
        assert await registry.ask(worker) is RunAnswer.ACCEPTED
        ready = await registry.settled()
        assert (ready.state, ready.worker, ready.error) == (TemplateState.READY, worker.instance, None)
        assert await registry.edited(worker) == (1, "hit")
        told = await registry.counters(worker, recorded=1, hits_memory=1)
        assert (told.memory_bytes, told.misses, told.failed) == (ready.size_bytes, 0, 0)
        assert await registry.ask(worker) is RunAnswer.ACCEPTED
        assert (await registry.settled()).size_bytes == ready.size_bytes
        await registry.counters(worker, recorded=1)


async def test_another_worker_records_it_at_first_sight(bench: Bench, registry: Registry) -> None:
    async with bench.worker() as worker:
        assert await registry.edited(worker, registered=False) == (1, "miss")
        other = await Registry.open(bench)
        assert await other.edited(worker) == (1, "miss")
        assert (await other.settled()).worker == worker.instance
        assert await other.edited(worker) == (1, "hit")
        assert (await registry.counters(worker, recorded=1)).misses == 2


async def test_an_edit_that_finds_it_tells_a_record_whose_recorder_has_died(
    bench: Bench, registry: Registry
) -> None:
    async with bench.worker() as worker:
        await registry.ask(worker)
        ready = await registry.settled()
        asked = templates.recording(ready, "dead", INSPECTION)
        await registry.records.change(asked.tenant, asked.template_id, lambda _: asked)
        assert await registry.edited(worker) == (1, "hit")
        found = await registry.settled()
        assert (found.state, found.worker, found.size_bytes) == (
            TemplateState.READY, worker.instance, ready.size_bytes,
        )  # fmt: skip


@pytest.mark.parametrize(("renew_steps", "computed"), [(7, 1), (0, 12)])
async def test_nothing_is_recorded_for_a_miss_where_the_policy_is_off(
    bench: Bench, registry: Registry, renew_steps: int, computed: int
) -> None:
    """Without a template an edit takes what its own steps make, or computes everything."""
    async with bench.worker(template_policy="off", renew_steps=renew_steps) as worker:
        for _ in range(2):
            assert await registry.edited(worker) == (computed, "miss")
        assert (await registry.counters(worker, misses=2)).recorded == 0


async def test_a_run_that_cannot_begin_is_told(bench: Bench, registry: Registry) -> None:
    async with bench.worker() as worker:
        assert await registry.ask(worker, conditioning=REF) is RunAnswer.ACCEPTED
        failed = await registry.settled()
        assert (failed.state, failed.worker) == (TemplateState.FAILED, worker.instance)
        assert present(failed.error).code == "input_lost"
        await registry.counters(worker, failed=1, recorded=0)


async def test_what_is_on_disk_is_prefetched_into_memory(
    bench: Bench, registry: Registry, tmp_path: Path
) -> None:
    async with bench.worker(template_folder=tmp_path) as worker:
        await registry.ask(worker)
        await registry.settled()
    async with bench.worker(template_folder=tmp_path) as worker:
        await registry.resident(worker, Tier.DISK)
        before = await registry.counters(worker, memory_bytes=0)
        assert before.disk_bytes > 0
        await registry.prefetch(worker)
        await registry.counters(worker, prefetched=1)
        await registry.resident(worker, Tier.MEMORY)
        assert await registry.edited(worker) == (1, "hit")
        await registry.counters(worker, hits_memory=0, hits_disk=1, misses=0)


async def test_a_removed_template_leaves_both_tiers_and_rows_that_run_go_on(
    bench: Bench, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The exact planner's choice follows what is loaded already, and pictures follow its choice; both edits are to learn
    # for themselves.
    monkeypatch.setattr(startup, "plan_batch", plan_each_alone(uniform_modes(BlockMode.KV)))
    async with bench.worker(template_folder=tmp_path, template_corrections_mb=0) as worker:
        await registry.ask(worker)
        await registry.settled()
        request = await registry.request(worker)
        await bench.run(worker, request)
        await bench.report()
        (whole,) = await bench.latents(request)
        while not bench.steps.empty():
            bench.steps.get_nowait()
        assert len(files_in(tmp_path)) == 1
        await registry.counters(
            worker, recorded=1
        )  # what was told before the recording counts no bytes either
        permits = worker.network.permits
        while permits.acquire(blocking=False):
            pass
        permits.release(1)
        running = await registry.request(worker)
        await bench.run(worker, running)
        await bench.step()
        await registry.remove()
        await registry.counters(worker, memory_bytes=0, disk_bytes=0)
        permits.release(1000)
        await bench.report()
        (interrupted,) = await bench.latents(running)
        assert (interrupted - whole).abs().max() < 1e-6
        assert await registry.edited(worker, registered=False) == (1, "miss")
        assert files_in(tmp_path) == []


async def test_a_later_edit_of_a_mask_takes_what_the_first_one_has_learned(
    bench: Bench, registry: Registry
) -> None:
    async with bench.worker() as worker:
        await registry.ask(worker)
        await registry.settled()
        assert await registry.edited(worker) == (1, "hit")
        told = await registry.counters(worker, recorded=1)
        while not told.corrections_bytes:
            told = await registry.counters(worker)
        assert told.corrected == 0
        assert await registry.edited(worker) == (1, "hit")
        await registry.counters(worker, corrected=1, corrections_bytes=told.corrections_bytes)
        await registry.remove()
        await registry.counters(worker, memory_bytes=0, corrections_bytes=0)


async def test_the_second_edit_of_a_picture_takes_what_the_first_one_left(
    bench: Bench, registry: Registry
) -> None:
    async with bench.worker() as worker:
        assert await registry.edited(worker, registered=False) == (1, "miss")
        told = await registry.counters(worker, first=1)
        assert told.first_bytes > 0
        assert await registry.edited(worker, registered=False) == (1, "hit")
        told = await registry.counters(worker, hits_first=1)
        assert (told.misses, told.recorded, told.memory_bytes) == (1, 0, 0)
        await registry.remove()
        await registry.counters(worker, first_bytes=0)
        assert await registry.edited(worker, registered=False) == (1, "miss")


async def test_a_strict_edit_learns_for_itself_and_teaches_nobody(bench: Bench, registry: Registry) -> None:
    async with bench.worker(template_policy="inline") as worker:
        for _ in range(2):
            assert await bench.edited(worker, reuse="strict") == 1
        await registry.counters(worker, hits_memory=1, corrected=0, corrections_bytes=0)


async def test_a_template_that_is_removed_while_it_is_recorded_is_not_kept(
    bench: Bench, registry: Registry, tmp_path: Path
) -> None:
    async with bench.worker(permits=1, template_folder=tmp_path) as worker:
        await registry.ask(worker)
        await registry.records.delete(registry.record)
        await registry.remove()
        await registry.counters(worker, failed=1)
        worker.network.permits.release(1000)
        assert await registry.edited(worker, registered=False) == (1, "miss")
        assert files_in(tmp_path) == []
        await registry.counters(worker, recorded=0, memory_bytes=0)


async def test_a_worker_that_drains_records_nothing_more(bench: Bench, registry: Registry) -> None:
    async with bench.worker(permits=0) as worker:
        await bench.run(worker, await bench.job(worker))
        worker.stop.set()
        await registry.counters(worker)
        state = await bench.states.get()
        while not state.draining:
            state = await bench.states.get()
        assert await registry.ask(worker) is RunAnswer.DRAINING
