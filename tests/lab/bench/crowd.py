"""Simulated services in a process of their own: ``python -m tests.lab.bench.crowd --help``.

`idle` workers tell of busy batches and take no jobs; `taking` ones take jobs and compute nothing. A prepost answers for
all. Everything is told and answered by the code that the services use.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from types import SimpleNamespace
from typing import Final

import click
import uvloop

from giornata.bus import bus as buses
from giornata.bus import streams
from giornata.bus.telemetry import telemetry
from giornata.records import JobRecordStore
from giornata.runtime import on_signals
from giornata.wire.templates import digest_of
from giornata.wire.workers import (
    CostFit,
    RowProgress,
    ServiceName,
    ServiceState,
    StepSample,
    TemplateCounters,
    Tier,
    WorkerCosts,
    WorkerState,
)
from giornata_lab.bench.systems.networks import plain
from giornata_lab.flags import option, parsed
from tests.fakes.denoiser import FakeDenoiser
from tests.fakes.fleet import CARD, FakePrepost

IDS: Final = tuple(digest_of("template", number) for number in range(970))
COSTS: Final = WorkerCosts(
    compute=CostFit(weights=(3.0, 0.1, 0.01, 1e-7, 0.0, 0.0), r2=1, residual_ms=1, samples=9, outliers=0),
    load=CostFit(weights=(0.1, 1e-6), r2=1, residual_ms=1, samples=9, outliers=0),
    device="gpu",
)
STEPS: Final = 30
STEPS_A_MESSAGE: Final = 4
MESSAGES: Final = 8
"""Different messages of a worker."""


class BusyWorker:
    """3 to 7 of 8 places taken. It tells the same messages again and again, since making them takes long."""

    def __init__(self, number: int, templates: int) -> None:
        self._chance = random.Random(number)  # noqa: S311 - a workload
        self._name = f"busy-{number}"
        ids = self._chance.sample(IDS, templates)
        disk = len(ids) * 3 // 4
        resident = {Tier.MEMORY: tuple(ids[disk:]), Tier.DISK: tuple(ids[:disk])}
        rows = [self._row(index) for index in range(self._chance.randint(3, 7))]
        self._states = cycle([self._state(rows, told, resident) for told in range(MESSAGES)])

    def state(self) -> ServiceState:
        """Its next message."""
        return next(self._states)

    def _state(
        self, rows: Sequence[RowProgress], told: int, resident: dict[Tier, tuple[str, ...]]
    ) -> ServiceState:
        running = (
            row.model_copy(update={"step": (row.step + told * STEPS_A_MESSAGE) % STEPS}) for row in rows
        )
        worker = WorkerState(
            capacity_rows=8,
            capacity_tokens=1 << 20,
            running=tuple(running),
            steps_total=told * STEPS_A_MESSAGE * len(rows),
            stepping_ms=12.5,
            templates=TemplateCounters(hits_memory=told),
            resident=resident,
            samples=tuple(self._samples(rows)),
            cost_model=COSTS,
            blocks=plain(57),
        )
        return ServiceState(
            service=ServiceName.DENOISER,
            instance=self._name,
            host="h",
            version="0",
            ready=True,
            models=(CARD,),
            worker=worker,
        )

    def _row(self, index: int) -> RowProgress:
        return RowProgress(
            job_id=f"job_{self._name}-{index}",
            attempt=1,
            index=0,
            step=self._chance.randrange(STEPS),
            steps=STEPS,
            tokens=4096,
            computed_tokens=self._chance.randint(200, 1500),
            text_tokens=512,
            begun=True,
        )

    def _samples(self, rows: Sequence[RowProgress]) -> Iterator[StepSample]:
        count, computed = len(rows), sum(row.computed_tokens or 0 for row in rows)
        for _ in range(STEPS_A_MESSAGE):
            yield StepSample(
                rows=count,
                sequences=count,
                image_tokens=computed,
                text_tokens=512 * count,
                attention_pairs=computed * 4608,
                linear=57.0 * (computed + 512 * count),
                attention=57.0 * computed * 4608,
                assemble_ms=0.3,
                step_ms=self._chance.uniform(55, 65),
                predicted_ms=60.0,
                reusing_ms=50.0,
                excess_ms=2.0,
            )


async def live(options: SimpleNamespace) -> None:
    """Tell and answer until a signal comes."""
    stop = asyncio.Event()
    on_signals(lambda _: stop.set(), lambda _: os._exit(130))
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(buses.connect(options.nats_url, "crowd"))
        await streams.ensure(bus.jetstream, replicas=1, events_ttl_s=600)
        await stack.enter_async_context(FakePrepost(bus, "prepost").run())
        records = await JobRecordStore.open(bus.jetstream)
        for number in range(options.taking):
            taking = FakeDenoiser(bus, records, f"taking-{number}", costs=COSTS)
            await stack.enter_async_context(taking.run())
        busy = [BusyWorker(number, options.templates) for number in range(options.idle)]
        for worker in busy:
            await stack.enter_async_context(telemetry(bus, options.hz, worker.state))
            await asyncio.sleep(1 / options.hz / options.idle)  # messages spread over the period
        await stop.wait()


def main() -> None:
    """Run until SIGTERM."""
    flags = [
        click.Option(["--nats-url"], required=True),
        option("--idle", type=int, default=0, help="workers that tell of busy batches"),
        option("--taking", type=int, default=0, help="workers that take jobs"),
        option("--hz", type=float, default=4.0, help="messages a second of each idle worker"),
        option("--templates", type=int, default=256, help="recordings that each idle worker has"),
    ]
    uvloop.run(live(parsed(__doc__, flags)))


if __name__ == "__main__":
    main()
