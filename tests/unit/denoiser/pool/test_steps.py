"""How rows enter steps of a pool, and what a rank keeps of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from giornata.frames import LENGTH
from giornata.scheduling.degrees.pool import Devices, StepStart
from giornata.scheduling.pool_rows import RowTimes
from giornata.wire.jobs import Priority
from giornata_denoiser.engine.model_runner import FiniteCheck, ModelRunner
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import GroupLost
from giornata_denoiser.pool.messages import (
    ForgetResources,
    RankStepEnded,
    RankStepFailed,
    ReleaseRows,
    StepOrder,
    unpack,
)
from giornata_denoiser.pool.rank import GroupFamilies, RankControls, RankLoras, RankSteps
from giornata_denoiser.pool.shared_memory import Arena
from giornata_denoiser.pool.state import PoolState, RankKnowledge, RowStepStart, SharedRow, SharedRowStore
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.pool import OneDevice
from tests.unit.denoiser.engine.edits import FORMS, GRID, where
from tests.unit.denoiser.engine.test_masked import OF

# What a rank keeps of rows from step to step, and when it lets go of it.


class Bench:
    """A rank's steps, and a leader's shelf before it."""

    def __init__(self, families: GroupFamilies | None = None) -> None:
        self.computing: list[ModelRunner] = []
        loras, controls = RankLoras(OF.device), RankControls(OF.device)
        self.steps = RankSteps(0, families or OneDevice(OF), self._made, loras, controls)
        self._shelf, self._told = SharedRowStore(Arena()), RankKnowledge()

    def _made(self, family: ModelFamily) -> ModelRunner:
        self.computing.append(ModelRunner(family, time.perf_counter, judge=FiniteCheck))
        return self.computing[-1]

    def put(self, row: Row) -> tuple[SharedRow, Row]:
        return self._shelf.put(row)

    def compute(
        self, shared: SharedRow, row: Row, step: int, *, fresh: bool
    ) -> RankStepEnded | RankStepFailed:
        ordered = self._shelf.ordered(row, shared, step, fresh=fresh, plain=False)
        for parcel in self._shelf.parcels(self._told, [(shared, ordered)]):
            order = unpack(parcel.frame[LENGTH.size :])
            self.steps.take(order, [os.dup(file) for file in parcel.files])
        return self.steps.compute(StepOrder(1, (0,), 1, (ordered,)))


@pytest.mark.parametrize("gone", [ReleaseRows, ForgetResources])
def test_what_is_kept_of_a_row_goes_when_the_row_does(gone: type[ReleaseRows | ForgetResources]) -> None:
    """It renews its own values: what it kept is of no use any more, and it may come back, but for a forgotten one."""
    bench = Bench()
    row = changed(tiny_flux.row(OF, Spec(grid=GRID, steps=6)), region=where(), renewed_every=3)
    shared, held = bench.put(row)
    for step, fresh in enumerate((True, False)):
        assert isinstance(bench.compute(shared, held, step, fresh=fresh), RankStepEnded)
    (computing,) = bench.computing
    assert computing.sources.keys == {row.key}
    bench.steps.take(gone((shared.number,)), ())
    assert not computing.sources.keys
    refused = bench.compute(shared, held, 2, fresh=False)
    assert isinstance(refused, RankStepFailed)
    assert refused.reason == "stale"
    again = bench.compute(shared, held, 2, fresh=True)
    assert isinstance(again, RankStepEnded if gone is ReleaseRows else RankStepFailed)


def test_an_order_of_a_row_at_another_step_is_refused() -> None:
    bench = Bench()
    shared, held = bench.put(tiny_flux.row(OF, Spec(grid=GRID, steps=6)))
    assert isinstance(bench.compute(shared, held, 0, fresh=True), RankStepEnded)
    refused = bench.compute(shared, held, 2, fresh=False)
    assert isinstance(refused, RankStepFailed)
    assert refused.reason == "stale"
    assert isinstance(bench.compute(shared, held, 1, fresh=False), RankStepEnded)


class Aborted(OneDevice):
    """A group of which a member was lost while it computed, as the leader has said."""

    def __init__(self) -> None:
        super().__init__(OF)
        self.aborted: set[tuple[Devices, int]] = set()

    def check(self, devices: Devices, epoch: int) -> None:
        if (devices, epoch) in self.aborted:
            raise GroupLost(devices, "a member is lost")

    def abort(self, devices: Devices, epoch: int) -> None:
        self.aborted.add((devices, epoch))


def test_what_an_aborted_group_has_computed_is_nothing() -> None:
    bench = Bench(Aborted())
    shared, held = bench.put(tiny_flux.row(OF, Spec(grid=GRID, steps=6)))
    assert isinstance(bench.compute(shared, held, 0, fresh=True), RankStepEnded)
    written = shared.ring.read(shared.memory, held, 1).latent.clone()
    bench.steps.abort((0,), 1)
    lost = bench.compute(shared, held, 1, fresh=False)
    assert isinstance(lost, RankStepFailed)
    assert lost.reason == "group"
    assert torch.equal(shared.ring.read(shared.memory, held, 1).latent, written)


# How rows enter steps: what of their last one is of use, and who has to let go of it.


PAIR = (0, 1)
Step = tuple[Devices, int, bool]
"""Devices, epoch of their group, and whether by halves."""


def entered(row: Row, steps: Sequence[Step]) -> RowStepStart:
    """How a row enters the last of these steps, once the others have ended."""
    book = PoolState(lambda _: RowTimes({}, {}, None))
    shared, held = SharedRowStore(Arena()).put(row)
    book.add(held, shared, 0.0)
    for devices, epoch, halves in steps:
        flight, (found,) = book.begin(
            StepStart((row.key,), devices), 0.0, epoch=epoch, halves=halves, seconds=1.0
        )
        list(book.settle(flight))
    return found


def test_a_rule_is_shown_what_a_job_has_been_promised() -> None:
    book = PoolState(lambda _: RowTimes({1: 1.0}, {1: 2.0}, None))
    row = tiny_flux.row(OF, Spec(grid=GRID, steps=6))
    row = changed(row, due_s=9.0, priority=Priority.BATCH)
    shared, held = SharedRowStore(Arena()).put(row)
    book.add(held, shared, 4.0)
    (shown,) = book.shown(5.0)
    assert (shown.arrived_s, shown.due_s, shown.left) == (4.0, 9.0, 6)
    assert shown.priority is Priority.BATCH


@pytest.mark.parametrize(
    ("steps", "fresh", "left"),
    [
        ([(PAIR, 1, False)], True, set()),
        ([(PAIR, 1, False)] * 2, False, set()),
        ([(PAIR, 1, False), (PAIR, 2, False)], True, set()),
        ([(PAIR, 1, False), (PAIR, 1, True)], True, set()),
        ([(PAIR, 1, True), ((1, 2), 3, True)], True, {0}),
        ([(PAIR, 1, False), ((3,), 4, False)], True, {0, 1}),
    ],
    ids=["first", "stays", "another group", "another way", "one stays", "both left"],
)
def test_a_row_goes_on_where_devices_group_and_way_stay(
    steps: list[Step], fresh: bool, left: set[int]
) -> None:
    found = entered(tiny_flux.row(OF, Spec(grid=GRID, steps=6)), steps)
    assert (found.fresh, set(found.left)) == (fresh, left)


@pytest.mark.parametrize(("devices", "leaves"), [((0,), True), (PAIR, False)])
def test_a_row_leaves_nothing_once_a_group_has_computed_a_step(devices: Devices, leaves: bool) -> None:
    row = tiny_flux.row(OF, Spec(grid=GRID, steps=6))
    row = replace(row, records=RecordingSpec(FORMS[0], 0, name="first"))
    found = entered(row, [((0,), 1, False), (devices, 2, False), ((0,), 1, False)])
    assert (found.held.row.records is not None) == leaves
