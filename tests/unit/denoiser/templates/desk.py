"""Lookup and runs over fakes, edits of one picture, and recordings of random values."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import structlog
import torch

from giornata import tensors
from giornata.families import Family as FamilyName
from giornata.planning.operations import StepCosts
from giornata.scheduling.batch import Capacity
from giornata.wire.errors import GiornataError
from giornata.wire.jobs import BlobRef, Encoding
from giornata.wire.messages import RemoveTemplate, RunRequest
from giornata.wire.requests import EditParameters, Reuse
from giornata_denoiser.attempts.inputs import TemplateLookup, TemplateReuse
from giornata_denoiser.choices import EXACT
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, store
from giornata_denoiser.templates.runs import PendingRegistration, TemplateRegistrations, TemplateRuns
from giornata_denoiser.templates.store import TemplateStore
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.configs import configured
from tests.contract.messages import CARD
from tests.fakes.blobs import MemoryBlobs
from tests.fakes.profiles import LOAD_WEIGHTS, WEIGHTS
from tests.fakes.row_engine import SteppedEngine
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.attempts.test_attempt import INSPECTION, JOB
from tests.unit.denoiser.engine.test_masked import OF

COSTS = StepCosts(WEIGHTS, LOAD_WEIGHTS)
WIDTH = OF.specs[0].parts["key"]
CHECKPOINT: Any = SimpleNamespace(
    card=CARD.model_copy(update={"family": FamilyName.FLUX_INPAINT}),
    family=OF,
    controlnets={},
    control_cards={},
)


class FakeEngine(SteppedEngine):
    """Tells what is submitted to it, and never steps by itself."""

    def __init__(self) -> None:
        super().__init__(Capacity(4, 10_000))
        self.submitted: list[Row] = []
        self.changed = asyncio.Event()

    def submit(self, rows: Sequence[Row]) -> bool:
        taken = super().submit(rows)
        self.submitted += rows
        self.changed.set()
        return taken


class FakeRegistrations:
    """Keeps what records would be told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, int | str]] = []
        self.changed = asyncio.Event()

    async def report(
        self, registered: PendingRegistration, outcome: int | GiornataError, *, only_waiting: bool = False
    ) -> None:
        told = outcome.code if isinstance(outcome, GiornataError) else outcome
        self.told.append(("found" if only_waiting else "report", registered.template_id, told))
        self.changed.set()


class Desk:
    """Templates over fakes, and edits of one picture."""

    def __init__(self, tasks: asyncio.TaskGroup, folder: Path | None, options: dict[str, Any]) -> None:
        self.engine, self.registrations, self.blobs = FakeEngine(), FakeRegistrations(), MemoryBlobs()
        config = configured(
            DenoiserConfig, model="tiny", template_folder=folder, **{"template_levels": 2, **options}
        )
        registrations = cast("TemplateRegistrations", self.registrations)
        self.store = TemplateStore(
            config.template_memory_mb << 20,
            folder,
            config.cache_disk_mb << 20,
            corrections_bytes=config.template_corrections_mb << 20,
            first_bytes=config.template_first_mb << 20,
        )
        self.runs = TemplateRuns(
            config,
            CHECKPOINT,
            self.blobs,
            self.store,
            engine=self.engine,
            registrations=registrations,
            tasks=tasks,
        )
        self.lookup = TemplateLookup(
            config,
            CHECKPOINT,
            self.store,
            runs=self.runs,
            registrations=registrations,
            costs=lambda: COSTS,
            tasks=tasks,
        )
        self.request = cast("RunRequest", None)

    async def fill(self) -> None:
        """Put the inputs of the edit where they belong."""
        text, conditioning = tiny_flux.inputs(OF, Spec())
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

    async def ask(self, request: RunRequest | None = None) -> TemplateReuse:
        async with self.lookup.held(request or self.request) as how:
            return present(how)

    async def submitted(self, number: int) -> Row:
        """The row of the run of this number."""
        async with asyncio.timeout(HUNG_S):
            while len(self.engine.submitted) < number:
                self.engine.changed.clear()
                await self.engine.changed.wait()
        return self.engine.submitted[number - 1]

    def finish(self, row: Row) -> None:
        """As the engine tells it."""
        assert row.records is not None
        tokens = torch.zeros(row.image_tokens, WIDTH)
        block = CachedBlock(*(store(tokens, row.records.bits) for _ in range(2)))
        kept = tuple(
            CachedBlock() if number < row.records.first_block else block for number in range(OF.depth)
        )
        entries = tuple(Entry(float(level), kept) for level in row.track.levels[:-1])
        self.engine.batch.settle([], [row.key])
        ended = replace(row, step=row.steps, records=replace(row.records, entries=entries))
        self.runs.advance(StepReport(0.0, 1.0, (ended,)))

    def remove(self) -> None:
        message = RemoveTemplate(tenant=JOB.tenant, template_key=INSPECTION.template_key)
        self.runs.remove(message)

    async def told(self, number: int) -> list[tuple[str, str, int | str]]:
        async with asyncio.timeout(HUNG_S):
            while len(self.registrations.told) < number:
                self.registrations.changed.clear()
                await self.registrations.changed.wait()
        return self.registrations.told


@asynccontextmanager
async def desk(folder: Path | None = None, **options: Any) -> AsyncIterator[Desk]:
    """A desk; what it logs is kept, not rendered, since tracebacks would show every tensor."""
    with structlog.testing.capture_logs():
        async with asyncio.TaskGroup() as tasks:
            made = Desk(tasks, folder, options)
            await made.fill()
            yield made
            made.runs.close()


# Recordings of random values, and whether two are equal.


def template(name: str, bits: int = 8, tokens: int = 6, seed: int = 0) -> CachedTemplate:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.randn(tokens, 8, generator=generator).bfloat16()

    entries = tuple(
        Entry(
            level,
            (
                CachedBlock(key=store(random(), bits), value=store(random(), bits)),
                CachedBlock(hidden=store(random(), bits)),
                CachedBlock(border=store(random(), bits)),
                CachedBlock(moments=store(random().float(), EXACT)),
                CachedBlock(),
            ),
        )
        for level in (1.0, 0.51234567891)
    )
    return CachedTemplate(name, (2, tokens // 2), entries)


def same(one: CachedTemplate, other: CachedTemplate) -> bool:
    return told(one) == told(other) and all(map(torch.equal, tensors_of(one), tensors_of(other)))


def told(of: CachedTemplate) -> object:
    """All but the values: names, levels, and which part of which block has which tensors."""
    parts = [vars(block) for entry in of.entries for block in entry.blocks]
    kinds = [
        {name: part and [each.dtype for each in part.tensors] for name, part in each.items()}
        for each in parts
    ]
    return of.id, of.grid, [entry.level for entry in of.entries], kinds


def tensors_of(of: CachedTemplate) -> list[torch.Tensor]:
    parts = (part for entry in of.entries for block in entry.blocks for part in block.parts)
    return [tensor for part in parts for tensor in part.tensors]
