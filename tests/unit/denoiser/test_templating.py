"""Templates at the edge: one run counts at a time, and nothing that fails there ends an edit or the worker."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import structlog
import torch
from safetensors import SafetensorError

from giornata import tensors
from giornata.blobs.memory import MemoryBlobs
from giornata.planning.costs import StepCosts
from giornata.scheduling.batch import Batch, Capacity
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import BlobRef, Encoding, Job
from giornata.wire.messages import RemoveTemplate, RunRequest
from giornata.wire.models import Family as FamilyName
from giornata.wire.requests import EditParameters, Reuse
from giornata_denoiser.attempts import inputs, outcomes
from giornata_denoiser.attempts.inputs import Reusing, reused, rows_of
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.engine import StepReport
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.stored import store
from giornata_denoiser.rows.template import Entry, Kept, Template
from giornata_denoiser.templates import identity
from giornata_denoiser.templates import runs as templating
from giornata_denoiser.templates.registered import Registered, Registrations
from giornata_denoiser.templates.runs import Templates
from giornata_denoiser.templates.store import TemplateStore
from tests.contract.messages import CARD
from tests.fakes import tiny_flux
from tests.fakes.profiles import LOAD_WEIGHTS, WEIGHTS
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.test_assignments import INSPECTION, JOB

COSTS = StepCosts(WEIGHTS, LOAD_WEIGHTS)
FAMILY = tiny_flux.family()
CHECKPOINT: Any = SimpleNamespace(
    scheduler=tiny_flux.SCHEDULER,
    card=CARD.model_copy(update={"family": FamilyName.FLUX_INPAINT}),
    family=FAMILY,
)


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """What is logged, not rendered: tracebacks would show every tensor."""
    with structlog.testing.capture_logs() as captured:
        yield captured


class FakeEngine:
    """Keeps what is submitted, as an engine that never computes."""

    def __init__(self) -> None:
        self.batch: Batch[Row] = Batch(Capacity(4, 10_000))
        self.submitted: list[Row] = []
        self.changed = asyncio.Event()

    def submit(self, rows: Sequence[Row]) -> bool:
        self.batch.submit(rows)
        self.submitted += rows
        self.changed.set()
        return True

    def cancel(self, job_id: str, attempt: int | None = None) -> tuple[Row, ...]:
        return self.batch.cancel(job_id, attempt)


class FakeRegistrations:
    """Keeps what records would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int | str]] = []
        self.changed = asyncio.Event()

    async def report(self, registered: Registered, outcome: int | GiornataError) -> None:
        told = outcome.code if isinstance(outcome, GiornataError) else outcome
        self.told.append(("report", registered.template_id, told))
        self.changed.set()

    async def found(self, registered: Registered, size_bytes: int) -> None:
        self.told.append(("found", registered.template_id, size_bytes))
        self.changed.set()


class Desk:
    """Templates over fakes, and edits of one picture."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path | None, options: dict[str, Any]) -> None:
        self.engine, self.registrations, self.blobs = FakeEngine(), FakeRegistrations(), MemoryBlobs()
        config = DenoiserConfig(model="tiny", template_folder=folder, **{"template_levels": 2, **options})
        self.store = TemplateStore(config.template_memory_mb << 20, folder, config.template_disk_mb << 20)
        self.templates = Templates(
            config,
            CHECKPOINT,
            self.store,
            engine=cast("Any", self.engine),
            blobs=self.blobs,
            registrations=cast("Registrations", self.registrations),
            costs=lambda: COSTS,
            tasks=tasks,
        )
        self.request = cast("RunRequest", None)

    async def fill(self) -> None:
        """Put the inputs of the edit where they belong."""
        text, conditioning = tiny_flux.inputs(FAMILY, Spec())
        refs = [
            await self.blobs.put(secrets.token_hex(4), tensors.pack(made), 60)
            for made in (text, conditioning)
        ]
        self.request = self.edit(*refs)

    def edit(self, text: BlobRef, conditioning: BlobRef, **parameters: Any) -> RunRequest:
        asked = EditParameters.model_validate(
            {"prompt": "x", "reuse": Reuse.AUTO, "num_inference_steps": 4, "strength": 1.0, **parameters}
        )
        job = JOB.model_copy(update={"parameters": asked, "template_id": "template_1"})
        encoding = Encoding(text=text, text_tokens=5, rows=(conditioning,), empty_text=text)
        return RunRequest(
            job=job,
            attempt=1,
            inspection=INSPECTION,
            encoding=encoding,
            rows=({"index": 0, "seed": 0},),  # type: ignore[arg-type]  # as it comes over the wire
            remaining_ms=1000,
        )

    async def ask(self, request: RunRequest | None = None) -> Reusing:
        async with self.templates.held(request or self.request) as how:
            assert how is not None
            return how

    async def submitted(self, number: int) -> Row:
        """The row of the run of this number."""
        async with asyncio.timeout(10):
            while len(self.engine.submitted) < number:
                self.engine.changed.clear()
                await self.engine.changed.wait()
        return self.engine.submitted[number - 1]

    def finish(self, row: Row) -> None:
        """As the engine tells it."""
        assert row.recording is not None
        tokens = torch.zeros(row.image_tokens, FAMILY.width)
        block = Kept(*(store(tokens, row.recording.bits) for _ in range(2)))
        kept = tuple(
            Kept() if number < row.recording.first_block else block for number in range(FAMILY.blocks)
        )
        entries = tuple(Entry(float(sigma), kept) for sigma in row.sigmas.sigmas[:-1])
        self.engine.batch.settle([], [row.key])
        self.templates.advance(StepReport(0.0, 1.0, (replace(row, step=row.steps, entries=entries),)))

    def remove(self) -> None:
        message = RemoveTemplate(tenant=JOB.tenant, template_key=INSPECTION.template_key)
        self.templates.remove(message)

    async def told(self, number: int) -> list[tuple[str, str, int | str]]:
        async with asyncio.timeout(10):
            while len(self.registrations.told) < number:
                self.registrations.changed.clear()
                await self.registrations.changed.wait()
        return self.registrations.told


@asynccontextmanager
async def desk(folder: Path | None = None, **options: Any) -> AsyncIterator[Desk]:
    async with asyncio.TaskGroup() as tasks:
        made = Desk(tasks, folder, options)
        await made.fill()
        yield made
        made.templates.close()


@pytest.mark.parametrize("error", [RuntimeError("broken"), MemoryError()])
async def test_a_template_that_cannot_be_kept_ends_its_run_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async with desk() as made:

        def broken(_: object) -> None:
            raise error

        monkeypatch.setattr(made.store, "put", broken)
        assert (await made.ask()).template is None
        made.finish(await made.submitted(1))
        assert await made.told(1) == [("report", "template_1", "internal_error")]
        assert made.templates.counters().failed == 1


async def test_a_full_disk_leaves_the_template_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with desk(tmp_path) as made:

        def full(*_: object, **__: object) -> None:
            raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("giornata_denoiser.templates.files.save_file", full)
        await made.ask()
        made.finish(await made.submitted(1))
        assert (await made.told(1))[0][0] == "report"
        assert (await made.ask()).template is not None


async def test_a_run_that_was_removed_while_it_fetched_begins_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next edit begins another of the same name: one row is submitted, and one run ends."""
    async with desk() as made:
        go_on = asyncio.Event()
        get, fetches = made.blobs.get, 0

        async def slow(ref: BlobRef) -> bytes:
            nonlocal fetches
            fetches += 1
            await go_on.wait()
            return await get(ref)

        monkeypatch.setattr(made.blobs, "get", slow)
        await made.ask()
        await asyncio.sleep(0)
        made.remove()
        await made.ask()
        await asyncio.sleep(0)
        assert fetches == 2
        go_on.set()
        row = await made.submitted(1)
        await asyncio.sleep(0.05)
        assert made.engine.submitted == [row]
        made.finish(row)
        told = await made.told(2)
        assert told[0] == ("report", "template_1", "template_not_found")
        assert (await made.ask()).template is not None
        assert made.templates.counters().recorded == 1


async def test_a_void_run_neither_ends_nor_cancels_the_one_that_counts() -> None:
    async with desk() as made:
        await made.ask()
        first = await made.submitted(1)
        made.remove()
        assert len(made.engine.batch) == 0
        await made.ask()
        second = await made.submitted(2)
        assert (first.key.job_id, first.key != second.key) == (second.key.job_id, True)
        made.finish(first)  # it was computed meanwhile
        await asyncio.sleep(0.05)
        assert made.templates.counters().recorded == 0
        assert len(made.engine.batch) == 1
        made.finish(second)
        await made.told(2)
        assert (made.templates.counters().recorded, made.templates.counters().failed) == (1, 1)


async def test_a_row_that_is_not_taken_ends_its_run_and_not_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with desk() as made:

        def refuse(_: object) -> bool:
            raise ValueError("row is in the batch already")

        monkeypatch.setattr(made.engine, "submit", refuse)
        await made.ask()
        assert await made.told(1) == [("report", "template_1", "internal_error")]


async def test_a_picture_that_nothing_holds_is_never_recorded() -> None:
    async with desk(template_memory_mb=0) as made:
        for _ in range(4):
            assert (await made.ask()).template is None
        await asyncio.sleep(0.05)
        assert made.engine.submitted == []


async def test_a_picture_larger_than_memory_is_recorded_once_and_smaller() -> None:
    tokens = 1024  # of 4 blocks, 2 parts and 7 levels of float32: 14 MiB
    async with desk(template_memory_mb=3, template_bits=0, template_levels=7) as made:
        text, conditioning = tiny_flux.inputs(FAMILY, Spec(grid=(32, 32)))
        refs = [
            await made.blobs.put(name, tensors.pack(data), 60)
            for name, data in (("a", text), ("b", conditioning))
        ]
        large = INSPECTION.model_copy(
            update={
                "tokens": tokens,
                "model_height": 32 * CHECKPOINT.card.pixel_multiple,
                "model_width": 32 * CHECKPOINT.card.pixel_multiple,
            }
        )
        request = made.edit(*refs).model_copy(update={"inspection": large})
        await made.ask(request)
        row = await made.submitted(1)
        assert row.recording is not None
        assert (row.steps, row.recording.first_block) == (4, 3)
        made.finish(row)
        await made.told(1)
        for _ in range(3):
            assert (await made.ask(request)).template is not None
        assert made.engine.submitted == [row]


async def test_whatever_fails_in_reading_a_template_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    async with desk(template_policy="off") as made:

        def broken(_: str) -> None:
            raise RuntimeError("CUDA error")

        monkeypatch.setattr(made.store, "find", broken)
        assert (await made.ask()).template is None


async def test_edits_tell_a_record_whose_recorder_has_died() -> None:
    async with desk() as made:
        unregistered = made.request.model_copy(update={"job": with_template(made.request.job, None)})
        for _ in range(2):
            await made.ask(unregistered)
        row = await made.submitted(1)
        for _ in range(2):
            await made.ask()  # meets the run
        made.finish(row)
        size = await made.told(1)
        await asyncio.sleep(0.01)
        assert size == [("report", "template_1", made.store.size_of(row.key.job_id))]
        await made.ask()
        assert (await made.told(2))[1] == ("found", "template_1", made.store.size_of(row.key.job_id))
        await made.ask(unregistered)
        assert len(made.registrations.told) == 2


async def test_noise_levels_and_regions_are_made_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[tuple[str, threading.Thread]] = []

    def watched(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            threads.append((name, threading.current_thread()))
            return work(*args, **named)

        return call

    monkeypatch.setattr(templating, "wanted", watched("wanted", identity.wanted))
    monkeypatch.setattr(inputs, "reused", watched("reused", inputs.reused))
    async with desk(template_policy="off") as made, made.templates.held(made.request) as how:
        await rows_of(made.request, CHECKPOINT, made.blobs, how)
    assert [name for name, _ in threads] == ["wanted", "reused"]
    assert threading.main_thread() not in {thread for _, thread in threads}


def test_a_template_that_is_not_worth_it_is_told_apart_from_none() -> None:
    row = tiny_flux.row(FAMILY, Spec())
    mask = torch.zeros_like(row.conditioning["mask"])
    mask[0] = 1
    row = replace(row, conditioning={**row.conditioning, "mask": mask})
    kept = Kept(*(store(torch.zeros(row.image_tokens, FAMILY.width), 8) for _ in range(2)))
    made = Template("t", row.grid, (Entry(1.0, (kept,) * FAMILY.blocks),))
    slow = StepCosts(WEIGHTS, (1e6, 1.0))
    everything = replace(row, conditioning={**row.conditioning, "mask": torch.ones_like(mask)})
    uses = [
        outcomes.template_use(job_that_reuses(), reused(edited, how, FAMILY))
        for edited, how in (
            (row, Reusing(0, 1.0, made, COSTS)),
            (row, Reusing(0, 1.0, made, slow)),
            (everything, Reusing(0, 1.0, made, COSTS)),
            (row, Reusing(0, 1.0, None, COSTS)),
            (everything, Reusing(0, 1.0, None, COSTS)),
        )
    ]
    assert uses == ["hit", "skipped", "skipped", "miss", "miss"]


def job_that_reuses() -> Job:
    return JOB.model_copy(update={"parameters": EditParameters(prompt="x", reuse=Reuse.AUTO)})


def with_template(job: Job, name: str | None) -> Job:
    return job.model_copy(update={"template_id": name})
