"""A denoiser without its bus, and the requests that a router would send it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from giornata.blobs import MemoryBlobs
from giornata.planning.step_costs import StepCosts
from giornata.scheduling.batch import Capacity
from giornata.tensors import pack
from giornata.wire.jobs import BlobRef, Encoding, Inspection, Job, Priority, RowRecord
from giornata.wire.messages import RunRequest
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.resolution import cfg_scale, resolve
from giornata_denoiser.attempts.inputs import rows_of
from giornata_denoiser.config import DenoiserConfig, TemplatePolicy
from giornata_denoiser.engine.engine import Engine, EngineLoop
from giornata_denoiser.engine.protocol import StepReport
from giornata_denoiser.rows.row import Row
from giornata_denoiser.templates.lookup import TemplateLookup
from giornata_denoiser.templates.runs import TemplateRegistrations, TemplateRuns
from giornata_denoiser.templates.store import TemplateStore
from giornata_prepost.images.geometry import Size
from giornata_prepost.images.stages import PixelLimits, inspect
from tests.configs import configured
from tests.integration.painting import Served
from tests.integration.prepost.asking import png
from tests.integration.prepost.oracle import picture
from tests.patience import HUNG_MS, HUNG_S

REF = BlobRef(key="none", size_bytes=0, sha256="")
SIZE = Size(128, 128)


@dataclass
class Worker:
    """A denoiser without its bus: an engine in its thread, template runs and their lookup."""

    of: Served
    engine: EngineLoop
    runs: TemplateRuns
    lookup: TemplateLookup
    blobs: MemoryBlobs
    steps: asyncio.Queue[Row] = field(default_factory=asyncio.Queue)
    """Rows after each of their steps."""

    async def edited(self, request: RunRequest) -> list[Row]:
        """The row of `request` after each of its steps."""
        async with asyncio.timeout(HUNG_S), self.lookup.held(request) as how:
            rows = await rows_of(request, self.of.checkpoint, self.blobs, how)
            assert self.engine.submit(rows)
            seen: list[Row] = []
            while not (seen and seen[-1].done):
                row = await self.steps.get()
                seen += [row] if row.records is None else []
            return seen


@asynccontextmanager
async def worker(of: Served) -> AsyncIterator[Worker]:
    """A worker that records a picture before its first edit."""
    config = configured(DenoiserConfig, model="tiny", template_policy=TemplatePolicy.INLINE, template_bits=0)
    loop, blobs, made = asyncio.get_running_loop(), MemoryBlobs(), list[Worker]()

    def reported(report: StepReport) -> None:
        assert report.failed == ()
        made[0].runs.advance(report)
        for row in report.advanced:
            made[0].steps.put_nowait(row)

    def crashed(error: Exception) -> None:
        raise error

    engine = Engine(of.checkpoint.family, Capacity(rows=8, tokens=1 << 20), lambda: 0.0)
    running = EngineLoop(engine, lambda report: loop.call_soon_threadsafe(reported, report), crashed)
    store = TemplateStore(config.template_memory_mb << 20, None, 0, corrections_bytes=1 << 20)
    registrations = cast("TemplateRegistrations", None)  # no picture is registered
    with running:
        async with asyncio.TaskGroup() as tasks:
            given: dict[str, Any] = {"registrations": registrations, "tasks": tasks}
            runs = TemplateRuns(config, of.checkpoint, blobs, store, engine=running, **given)
            costs = StepCosts((0.1, 0.0, 1.0, 0.0, 0.0, 0.0))  # computing costs, loading nothing
            lookup = TemplateLookup(config, of.checkpoint, store, runs=runs, costs=lambda: costs, **given)
            made.append(Worker(of, running, runs, lookup, blobs))
            yield made[0]
            runs.close()


async def asked_of(made: Worker, reuse: Reuse = Reuse.STRICT, **fields: Any) -> RunRequest:
    """An edit of one tile, as gateway, prepost and router ask for it."""
    of = made.of
    given = EditParameters(prompt="a red hat", reuse=reuse, halo=0, mask_blur=0, **fields)
    parameters = resolve(given, of.card, 7)
    marked = np.zeros((SIZE.height, SIZE.width), np.uint8)
    marked[:20, :20] = 255
    found = inspect(png(picture(SIZE)), png(marked), parameters, of.card, PixelLimits(1 << 20, 1 << 20))
    (row,) = of.images.encode_rows(
        picture(SIZE),
        marked,
        [7],
        modes=True,
        draws=bool(parameters.sampler and parameters.sampler.stochastic),
        strength=parameters.strength or 0,
    )
    text = of.images.encode_text(given.prompt, SIZE) | of.images.encode_unguided(None, SIZE)
    empty = of.images.encode_text("", SIZE)
    refs = [await made.blobs.put(f"{i}", pack(each), 60) for i, each in enumerate((text, empty, row))]
    job = Job(
        job_id="edit",
        tenant="t",
        gateway="g",
        priority=Priority.BATCH,
        model=of.card.name,
        model_digest=of.card.digest,
        parameters=parameters,
        cfg_scale=cfg_scale(parameters, of.card),
        image=REF,
        template_id="known" if reuse is Reuse.STRICT else None,
        budget_ms=HUNG_MS,
        result_ttl_s=60,
    )
    return RunRequest(
        job=job,
        attempt=1,
        inspection=Inspection.model_validate(vars(found) | {"prepared": REF, "alpha": None}),
        encoding=Encoding(
            text=refs[0], text_tokens=of.images.text_tokens(text), rows=(refs[2],), empty_text=refs[1]
        ),
        rows=(RowRecord(index=0, seed=7),),
        remaining_ms=HUNG_MS,
    )
