"""Masked rows whose degree and devices change: they equal rows that begin in a new engine where the devices change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from giornata.scheduling.batch import Capacity
from giornata.scheduling.degrees.pool import Devices
from giornata_denoiser.blocks.device import Device
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.correction import Correction
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from tests.integration.denoiser.pool.bench import Model, Walk, equal, running

STEPS = 6
GRID = (4, 5)
FORMS = [frozenset({CacheForm.KV}), frozenset({CacheForm.HIDDEN}), frozenset(CacheForm)]
PAIRS: list[Devices] = [(0, 1), (0, 1), (0, 1, 2), (0, 1, 2), (2, 3), (2, 3)]
"""Several devices all the time: what a row takes from a template is planned there without regard to loads."""


class Leg:
    """A row's steps on the same devices, by an engine that is new to it."""

    def __init__(self, model: Model, row: Row, known: tuple[Correction, ...] | None) -> None:
        self._engine = engine(model)
        self._engine.batch.submit([replace(row, begun=False, corrections=known)])

    def step(self) -> Row:
        report = self._engine.step()
        assert report is not None
        assert not report.failed
        (row,) = report.advanced
        return row


def engine(model: Model) -> Engine:
    reusing = ReuseOptions(correction_bits=EXACT, device=Device())
    return Engine(model.checkpoint.family, Capacity(1, 1), lambda: 0.0, reusing=reusing)


def walked(model: Model, row: Row, plan: Sequence[Devices]) -> Row:
    """The row after its steps by these devices; one device tells what it has learned, and several do not."""
    known, before = row.corrections, None
    leg = Leg(model, row, known)
    for devices in plan:
        if before not in (None, devices):
            leg = Leg(model, row, known)
        row, before = leg.step(), devices
        if len(devices) == 1:
            known = row.corrections
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
    return replace(row, template=recording, renewed_every=0)


def learned(model: Model, row: Row) -> tuple[Correction, ...]:
    """What the first step of another row with the same mask teaches."""
    corrections = Leg(model, row, None).step().corrections
    assert corrections is not None
    return corrections


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


def test_rows_with_a_template_with_and_without_known_corrections(model: Model) -> None:
    rows: list[Row] = []
    for index, forms in enumerate(FORMS):
        recording = template(model, forms)
        known = learned(model, taking(model, recording, "teacher", seed=5))
        rows += [
            taking(model, recording, f"{index} learns", seed=1, guided=True),
            taking(model, recording, f"{index} learns alone", seed=2),
            replace(taking(model, recording, f"{index} knows", seed=3), corrections=known),
        ]
    compared(model, rows, PAIRS)
    for row in rows:  # the difference shows where a step was computed in full
        stays = walked(model, row, [(0, 1)] * STEPS).latent
        moves = walked(model, row, PAIRS).latent
        assert torch.allclose(stays, moves, rtol=0, atol=1e-4) == (row.corrections is not None)


def test_rows_that_renew_their_own_leave_nothing_of_a_group(model: Model) -> None:
    plan: list[Devices] = [(0,), (0,), (0, 1), (0, 1), (1,), (0, 1, 2)]
    own = model.row("own", grid=GRID, steps=STEPS, seed=4, guided=True, masked=True)
    other = model.row("leaves", grid=(3, 5), steps=STEPS, seed=6, masked=True)
    recording = RecordingSpec(FORMS[0], EXACT, name="first")
    compared(model, [own, replace(other, records=recording)], plan)
