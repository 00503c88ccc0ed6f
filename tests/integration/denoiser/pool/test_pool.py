"""Pools compute what one process computes, whichever devices compute which step, also behind real NATS."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from giornata.families import Family
from giornata.planning.cost_model import StepParallelism
from giornata.scheduling.batch import Capacity
from giornata.scheduling.degrees.pool import Devices
from giornata.wire import subjects
from giornata.wire.adapters import ControlUse
from giornata.wire.messages import RunAnswer
from giornata.wire.workers import RankPhase, ServiceName, ServiceState
from giornata_denoiser.__main__ import serve
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.slabs import Device
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Correction
from giornata_lab.bench.compute.rows import changed
from tests.integration.denoiser.bench import WAIT_S, Bench, Worker, taken
from tests.integration.denoiser.pool.bench import TOLERANCE, Gathered, Model, Walk, equal, open_model, running
from tests.integration.denoiser.test_remote_controls import instance
from tests.integration.denoiser.test_service_adapters import controlled, loaded
from tests.present import present

# Pools compute what one process computes, whichever devices compute which step.


# Masked rows whose degree and devices change: they equal rows that begin in a new engine where the devices
# change.


STEPS = 6
GRID = (4, 5)
FORMS = [frozenset({CacheForm.KV}), frozenset({CacheForm.HIDDEN})]
PAIRS: list[Devices] = [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (0, 1), (0, 1)]
"""Several devices all the time: what a row takes from a template is planned there without regard to loads."""


class Leg:
    """A row's steps on the same devices, by an engine that is new to it."""

    def __init__(self, model: Model, row: Row, known: tuple[Correction, ...] | None) -> None:
        self._engine = engine(model)
        self._engine.batch.submit([changed(row, degree=0, corrections=known)])

    def step(self) -> Row:
        report = present(self._engine.step())
        assert not report.failed
        (row,) = report.advanced
        return row


def engine(model: Model) -> Engine:
    reusing = ReuseOptions(correction_bits=EXACT, device=Device())
    return Engine(model.checkpoint.family, Capacity(1, 1), lambda: 0.0, reusing=reusing)


def walked(model: Model, row: Row, plan: Sequence[Devices]) -> Row:
    """The row after its steps by these devices; one device tells what it has learned, and several do not."""
    known, before = row.reuse.corrections, None
    leg = Leg(model, row, known)
    for devices in plan:
        if before not in (None, devices):
            leg = Leg(model, row, known)
        row, before = leg.step(), devices
        if len(devices) == 1:
            known = row.reuse.corrections
    return row


def template(model: Model, forms: Iterable[CacheForm]) -> CachedTemplate:
    made, family = engine(model), model.checkpoint.family
    run = model.row("run", grid=GRID, steps=STEPS, seed=9)
    made.batch.submit([replace(run, records=RecordingSpec(frozenset(forms), EXACT))])
    entries = None
    while (report := made.step()) is not None:
        entries = next((row.entries for row in report.advanced if row.done), entries)
    assert entries is not None
    assert family.depth == len(entries[0].blocks)
    return CachedTemplate("t", GRID, entries)


def taking(model: Model, recording: CachedTemplate, name: str, seed: int, *, guided: bool = False) -> Row:
    row = model.row(name, grid=GRID, steps=STEPS, seed=seed, guided=guided, masked=True)
    return changed(row, template=recording, renewed_every=0)


def learned(model: Model, row: Row) -> tuple[Correction, ...]:
    """What the first step of another row with the same mask teaches."""
    return present(Leg(model, row, None).step().reuse.corrections)


def compared(model: Model, rows: Sequence[Row], plan: Sequence[Devices]) -> None:
    devices = 1 + max(max(each) for each in plan)
    config = model.config(devices).model_copy(update={"template_bits": EXACT})
    with running(config, Walk(plan)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
        assert sorted(bench.degrees) == sorted(len(rows) * [len(devices) for devices in plan])
    equal(bench.latents(), {row.key.job_id: walked(model, row, plan).latent for row in rows})
    for row in bench.ended.values():
        assert isinstance(row, Row)
        assert row.records is None
        assert not row.entries


def test_rows_with_a_template_with_and_without_known_corrections(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """Of a network that does not blend: ranks have the pictures in the run's latents, too."""
    model = open_model(tiny_checkpoint(Family.FLUX_FILL)).profiled(tmp_path / "profile.json", (2, 3))
    rows: list[Row] = []
    for index, forms in enumerate(FORMS):
        recording = template(model, forms)
        known = learned(model, taking(model, recording, "teacher", seed=5))
        rows += [
            taking(model, recording, f"{index} learns", seed=1, guided=True),
            taking(model, recording, f"{index} learns alone", seed=2),
            changed(taking(model, recording, f"{index} knows", seed=3), corrections=known),
        ]
    compared(model, rows, PAIRS)
    for row in rows:  # the difference shows where a step was computed in full
        stays = walked(model, row, [(0, 1)] * STEPS).latent
        moves = walked(model, row, PAIRS).latent
        assert torch.allclose(stays, moves, rtol=0, atol=1e-4) == (row.reuse.corrections is not None)


def test_degree_and_devices_change_between_the_steps_of_a_row(model: Model) -> None:
    """Of rows that renew their own, too; and of one that is to leave something, and leaves nothing of a group."""
    plan: list[Devices] = [(0,), (0,), (0, 1), (0, 1), (1,), (0, 1, 2, 3), (2, 3), (0, 1, 2), (3,)]
    own = model.row("own", grid=GRID, steps=len(plan), seed=4, guided=True, masked=True)
    other = model.row("leaves", grid=(3, 5), steps=len(plan), seed=6, masked=True)
    leaves = replace(other, records=RecordingSpec(FORMS[0], EXACT, name="first"))
    compared(model, [model.row("walks", steps=len(plan), guided=True), own, leaves], plan)


# Guidance halves, chosen by step where they are the quicker way of two devices: equal to one process.


def ways(bench: Gathered) -> Counter[StepParallelism]:
    """How many steps were computed in which way, as the samples tell."""
    return Counter(StepParallelism(sample.degree, sample.halves) for sample in bench.samples)


def test_guided_rows_of_a_transformer_have_halves_and_others_share_tokens(
    model: Model, tmp_path: Path
) -> None:
    """A row that learns a correction by halves has it by halves afterwards."""
    model = model.profiled(tmp_path / "profile.json", (2,), halves=True)
    plan: list[Devices] = [(0, 1), (0, 1), (0, 1), (1,), (0, 1), (0, 1)]
    rows = [
        model.row("guided", steps=STEPS, guided=True),
        model.row("plain", steps=STEPS, seed=1),
        model.row("own", grid=GRID, steps=STEPS, seed=2, guided=True, masked=True),
        taking(model, template(model, FORMS[0]), "takes", seed=3, guided=True),
    ]
    config = model.config(2).model_copy(update={"template_bits": EXACT})
    with running(config, Walk(plan)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    assert ways(bench) == {
        StepParallelism(2, halves=True): 3 * 5,
        StepParallelism(2): 5,
        StepParallelism(1): 4,
    }
    equal(bench.latents(), {row.key.job_id: walked(model, row, plan).latent for row in rows})


def test_a_unet_is_computed_by_halves_and_in_no_other_way(
    tiny_checkpoint: Callable[[Family], Path], tmp_path: Path
) -> None:
    """Whatever its profile has: its rows without guidance have one device."""
    unet = open_model(tiny_checkpoint(Family.SD_INPAINT))
    model = unet.profiled(tmp_path / "profile.json", (2, 3), halves=True)
    rows = [model.row(f"{seed}", grid=(4, 4), seed=seed, guided=seed < 2) for seed in range(3)]
    with running(model.config(2)) as bench:
        assert bench.pool.submit(rows)
        bench.until_ended([row.key.job_id for row in rows])
    found = ways(bench)
    assert found.keys() == {StepParallelism(), StepParallelism(2, halves=True)}
    equal(bench.latents(), model.alone(rows))


# A denoiser of two devices behind real NATS, as it is started: its rows equal one device's, and it
# drains.


@pytest.fixture
def checkpoint(model: Model) -> Checkpoint:
    return model.checkpoint


@asynccontextmanager
async def pooled(bench: Bench, model: Model, **options: Any) -> AsyncIterator[Worker]:
    """The service itself, on two devices."""
    config = DenoiserConfig(
        **{
            **model.config(2).model_dump(exclude_unset=True),
            "nats_url": bench.urls[0],
            "blobs_url": bench.urls[1],
            "instance": f"denoiser-{secrets.token_hex(3)}",
            "served_name": "tiny",
            "telemetry_hz": 20,
            **options,
        }
    )
    stop = asyncio.Event()
    subject = subjects.telemetry(ServiceName.DENOISER, config.instance)
    async with bench.bus.listen(subject, ServiceState, bench.states.put_nowait):
        task = asyncio.create_task(serve(config, stop))
        try:
            state = await asyncio.wait_for(bench.states.get(), WAIT_S)
            assert state.worker is not None
            assert [rank.phase for rank in state.worker.ranks] == [RankPhase.READY] * 2
            assert {StepParallelism(told.degree, told.halves) for told in present(state.worker.cost_model).degrees} == {
                StepParallelism(2), StepParallelism(3), StepParallelism(4),
            }  # fmt: skip
            yield Worker(config.instance, None, stop, task)  # type: ignore[arg-type]  # its network is elsewhere
        finally:
            stop.set()
            await asyncio.wait([task])
        task.result()


async def test_edits_are_served_as_one_device_serves_them_and_a_drained_row_goes_on_elsewhere(
    bench: Bench, model: Model
) -> None:
    steps = 200
    asked: list[dict[str, Any]] = [{"n": 2, "reuse": "off"}, {"painted": [0], "reuse": "off", "seed": 3}]
    latents = []
    async with pooled(bench, model, template_policy="inline", drain_s=0) as pool:
        requests = [await bench.job(pool, **each) for each in asked]
        for request in requests:
            assert await bench.run(pool, request) is RunAnswer.ACCEPTED
        events = [await bench.report() for _ in requests]
        assert {event.job_id for event in events} == {request.job.job_id for request in requests}
        assert not any(event.handed_back for event in events)
        latents += [await bench.latents(request) for request in requests]
        assert await bench.edited(pool, reuse="strict") == 1, (
            "from a template, which one device records first"
        )
        told = [bench.states.get_nowait() for _ in range(bench.states.qsize())]
        assert {each.degree for state in told if state.worker for each in state.worker.samples} == {1, 2}
        drained = await bench.job(pool, steps=steps)
        await bench.run(pool, drained)
        while (step := await bench.step()).job_id != drained.job.job_id:
            pass
        assert step.step == 1
        pool.stop.set()
        assert (await bench.report()).handed_back
    record = await bench.records.get(drained.job.job_id)
    (row,) = record.rows
    assert 1 <= present(row.resume).step < steps
    async with bench.worker() as one:
        for each, found in zip(asked, latents, strict=True):
            request = await bench.job(one, **each)
            await bench.run(one, request)
            await bench.report()
            for latent, wanted in zip(found, await bench.latents(request), strict=True):
                torch.testing.assert_close(latent, wanted, atol=TOLERANCE, rtol=0)
        await bench.records.change(record.job.job_id, lambda r: taken(r, 2, one.instance))
        await bench.run(one, drained.model_copy(update={"attempt": 2, "rows": record.pending_rows}))
        assert not (await bench.report()).handed_back
        (resumed,) = await bench.latents(drained)
        whole = await bench.job(one, steps=steps)
        await bench.run(one, whole)
        await bench.report()
        (uninterrupted,) = await bench.latents(whole)
    torch.testing.assert_close(resumed, uninterrupted, atol=TOLERANCE, rtol=0)


async def test_a_pool_asks_the_service_for_a_controlnet_that_none_of_its_devices_has(
    bench: Bench, model: Model, tmp_path: Path
) -> None:
    use = ControlUse(model="edges", digest=loaded(bench, tmp_path).card.digest, scale=0.8)
    async with bench.worker() as one:
        here = await bench.computed(one, await controlled(bench, await bench.job(one), use))
    while not bench.states.empty():
        bench.states.get_nowait()
    bench.checkpoint = replace(bench.checkpoint, controlnets={})
    async with instance(bench, tmp_path, "c1") as gate, pooled(bench, model) as pool:
        there = await bench.computed(pool, await controlled(bench, await bench.job(pool), use))
        assert gate.forwards
    torch.testing.assert_close(there, here, atol=TOLERANCE, rtol=0)
