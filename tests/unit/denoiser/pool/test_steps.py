"""How rows enter steps of a pool, what a rank keeps of them, and what leader and ranks send each other."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import msgpack
import pytest
import torch
from torch import Tensor

from giornata.frames import LENGTH, MalformedFrame, framed
from giornata.scheduling.degrees.pool import Devices, StepStart
from giornata.scheduling.pool_rows import RowTimes
from giornata.wire.jobs import Priority
from giornata.wire.models import TaylorSeerSchedule
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.model_runner import FiniteCheck, ModelRunner
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import GroupLost
from giornata_denoiser.pool.messages import (
    ForgetResources,
    RankStepEnded,
    RankStepFailed,
    ReleaseRows,
    StepOrder,
    connect,
    pack,
    unpack,
)
from giornata_denoiser.pool.rank import GroupFamilies, RankControls, RankLoras, RankSteps
from giornata_denoiser.pool.shared_memory import Arena, TensorPlaces, mapped_tensor
from giornata_denoiser.pool.state import PoolState, RankKnowledge, RowStepStart, SharedRow, SharedRowStore
from giornata_denoiser.rows.parts import TaylorRule
from giornata_denoiser.rows.row import Prompt, RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes.pool import OneDevice
from tests.present import present
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


# What leader and ranks send each other is msgpack of known classes, and its tensors lie in shared memory.


def travelled(thing: object, kept: object = None) -> object:
    """`thing` as a rank reads it; `kept` is known there as number 7."""
    places = TensorPlaces()
    data = pack(thing, places, lambda part: 7 if part is kept else None)
    descriptor = present(places.written())
    memory = mapped_tensor(descriptor, places.size_bytes)
    os.close(descriptor)
    return unpack(data, lambda place: places.tensor(place, memory), {7: kept})


def alike(one: object, other: object) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if type(one) is tuple and isinstance(other, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if type(one) is type(other) and hasattr(one, "__dataclass_fields__"):
        names = [each.name for each in fields(one) if each.init]  # type: ignore[arg-type]  # of a dataclass
        return all(alike(getattr(one, name), getattr(other, name)) for name in names)
    return type(one) is type(other) and one == other


UNET = Prompt({"prompt_embeds": torch.randn(3, 4), "add_time_ids": torch.arange(6.0)}, 0, kept_channels=8)
DRIVEN = Prompt({"prompt_embeds": torch.randn(3, 4).bfloat16(), "none": torch.empty(0, 4)}, 3, (2, 3), 1.5)


def row() -> Row:
    made = tiny_flux.row(OF, Spec(grid=GRID, steps=4))
    return changed(
        made,
        region=where(),
        records=RecordingSpec(frozenset({CacheForm.KV}), 0, name="first"),
        step_cache=TaylorRule(TaylorSeerSchedule(3, 2), 1),
        prompts=(*made.inputs.prompts, UNET, DRIVEN),
    )


def test_a_row_is_the_same_in_a_rank() -> None:
    before = row()
    after = travelled(before)
    assert alike(before, after)
    assert isinstance(after, Row)
    assert (after.wishes.due_s, after.wishes.priority, after.records) == (
        before.wishes.due_s,
        before.wishes.priority,
        before.records,
    )
    assert not alike(before, replace(before, latent=before.latent + 1)), "or nothing was compared"


def test_what_rows_share_is_named_and_not_copied() -> None:
    template = CachedTemplate("t", GRID, ())
    after = travelled(changed(row(), template=template), template)
    assert isinstance(after, Row)
    assert after.reuse.template is template


def test_tensors_that_lie_in_shared_memory_stay_there() -> None:
    arena = Arena()
    memory = arena.allocated(1 << 10)
    known, other = memory[64:128].view(torch.float32), torch.arange(3)
    places = TensorPlaces(arena)
    pack((known, other, known), places)
    assert (places.place(known).slab, places.place(known).offset) == (arena.number_of(memory), 64)
    assert places.place(other).slab == 0
    assert places.size_bytes == 64, "the other one alone"


@dataclass
class Stranger:
    name: str


def test_classes_that_nobody_named_are_neither_sent_nor_made() -> None:
    with pytest.raises(TypeError, match="Stranger"):
        pack(Stranger("x"))
    with pytest.raises(KeyError, match="Stranger"):
        unpack(msgpack.packb({"": "Stranger", "name": "x"}))
    with pytest.raises(KeyError, match="system"):
        unpack(msgpack.packb({"": "system", "name": "x"}))


def test_frames_arrive_whole_with_their_files_in_order() -> None:
    one, other = map(connect, socket.socketpair())
    first, second = (os.memfd_create(name) for name in "ab")
    for data, files in ((b"x" * 100_000, ()), (b"with", (first,)), (b"again", (second,))):
        one.send(framed(data), files)
    assert other.receive() == b"x" * 100_000
    found, ended = other.receive_ready()
    assert (found, ended) == ((b"with", b"again"), False)
    for sent in (first, second):
        came = other.take_file()
        assert os.fstat(came).st_ino == os.fstat(sent).st_ino
        os.close(came)
        os.close(sent)
    with pytest.raises(MalformedFrame, match="without its file"):
        other.take_file()
    one.close()
    assert other.receive_ready() == ((), True)
    other.close()
