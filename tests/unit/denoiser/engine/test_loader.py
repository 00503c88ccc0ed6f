"""What moves beside steps: slabs that are loaded ahead, and entries that go to host memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.packing import make_region
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.engine.loading import (
    AsyncHostCopy,
    FinishedSlabLoad,
    Loader,
    SlabRun,
)
from giornata_denoiser.engine.recorders import EntryRecorder
from giornata_denoiser.engine.slabs import Device, Slabs, TransferHandle, WaitTimer
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import CachedBlock, Entry, StoredTensor, store
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.patience import HUNG_S
from tests.present import present
from tests.unit.denoiser.engine.edits import FORMS, GRID, edit, engine, finish_rows, finished, template
from tests.unit.denoiser.engine.test_masked import OF

# Loading ahead: the same pictures, slabs in the order of their use, nobody left waiting.


BLOCKS = 4
KV = (BlockMode.KV,) * BLOCKS


def entry(level: float = 0.5, blocks: int = BLOCKS) -> Entry:
    recorder = EntryRecorder(level, blocks, RecordingSpec(frozenset({CacheForm.KV}), 8))
    for block in range(blocks):
        recorder.keys_values(block, torch.randn(6, 4, 16), torch.randn(6, 4, 16))
    return recorder.entry()


def slabs(of: Entry) -> Slabs:
    where = present(make_region(torch.tensor([[True, False, False], [False, False, False]])))
    return Slabs(of, where, own=2, family=OF)


def test_loading_ahead_changes_no_picture() -> None:
    taken = template(OF, steps=3)
    rows = [
        edit(OF, taken, Spec("a", grid=GRID, steps=5, seed=1)),
        edit(OF, taken, Spec("b", grid=GRID, steps=7, true_cfg_scale=2.0, seed=2)),
    ]
    heard: list[FinishedSlabLoad] = []
    with Loader(on_loaded=heard.append) as loader:
        ahead = finish_rows(OF, rows, loader=loader)
    inline = finish_rows(OF, rows)
    assert all(torch.equal(ahead[name].latent, inline[name].latent) for name in "ab")
    # Three entries, each gathered once for a's one sequence and once for each of b's two.
    assert len(heard) == 3 * BLOCKS * 3
    first = [load.load.block for load in heard[: 3 * BLOCKS]]
    assert first == sorted(first)


def test_equal_regions_share_slabs_where_nothing_is_corrected() -> None:
    taken = template(OF, steps=1)
    heard: list[FinishedSlabLoad] = []
    with Loader(on_loaded=heard.append) as loader:
        made = engine(OF, loader=loader, correction_bits=None)
        made.batch.submit(
            [edit(OF, taken, Spec(name, grid=GRID, steps=2, seed=n)) for n, name in enumerate("ab")]
        )
        assert made.step() is not None
    assert len(heard) == BLOCKS


def test_who_asks_waits_for_what_is_expected() -> None:
    of = slabs(entry())
    hold = threading.Event()
    began = threading.Event()

    def held(_: FinishedSlabLoad) -> None:
        began.set()
        assert hold.wait(HUNG_S)

    found: list[object] = []
    with Loader(on_loaded=held) as loader:
        loader.schedule([[SlabRun(of, KV, 2)]])
        assert began.wait(HUNG_S)
        waiting = threading.Thread(target=lambda: found.append(of.keys_values(1)))
        waiting.start()
        assert found == []
        hold.set()
        waiting.join(HUNG_S)
    assert found == [of.keys_values(1)]


def test_a_loader_that_stops_leaves_nobody_waiting() -> None:
    of = slabs(entry())
    with Loader(rate_bytes_s=1.0) as loader:  # hours for the first slab
        loader.schedule([[SlabRun(of, KV, BLOCKS)]])
        loader.schedule([[SlabRun(of, KV, BLOCKS)]])  # are expected already
    assert all(of.gathered(block).room == 2 for block in range(BLOCKS))


def test_what_cannot_be_loaded_is_told_to_who_asks() -> None:
    of = slabs(entry())
    with Loader() as loader:
        loader.schedule([[SlabRun(of, (BlockMode.HIDDEN, BlockMode.KV), 2)]])
        with pytest.raises(LookupError, match="does not hold"):
            of.hidden(0)
        assert of.gathered(1).room == 2


def test_what_nobody_wants_any_more_is_not_loaded() -> None:
    one, other = slabs(entry()), slabs(entry())
    heard: list[FinishedSlabLoad] = []
    hold = threading.Event()

    def held(loaded: FinishedSlabLoad) -> None:
        heard.append(loaded)
        assert hold.wait(HUNG_S)

    with Loader(on_loaded=held) as loader:
        loader.schedule([[SlabRun(other, KV, 2), SlabRun(one, KV, 1)]])
        other.keys_values(0)
        loader.schedule([[SlabRun(other, (BlockMode.FULL, BlockMode.KV), 2)]])
        assert not one.has(0, BlockMode.KV)
        hold.set()
        other.keys_values(1)
    assert [(load.load.slabs, load.load.block) for load in heard] == [(other, 0), (other, 1)]


# Entries get to host memory in a thread of their own, byte for byte, and before the run that they are of
# has ended.


class Slow(Device):
    """Copies nothing before its gate is open, or raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.gate, self._error = Event(), error
        self.produced_before = 0
        self._produced = 0

    def produced(self) -> None:
        self._produced += 1

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        assert self.gate.wait(20)
        if self._error is not None:
            raise self._error
        self.produced_before = self._produced
        yield TransferHandle()


def copies(device: Device) -> AsyncHostCopy:
    return AsyncHostCopy(device, WaitTimer(lambda: 0.0))


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(entry: Entry) -> list[Tensor]:
    return [tensor for kept in entry.blocks for part in kept.parts for tensor in part.tensors]


class Far(Device):
    """Copies when an arrival is waited for, as a stream may: memory that was let go of before is gone."""

    def __init__(self, sources: list[weakref.ref[Any]]) -> None:
        self._sources = sources

    @contextmanager
    def loading(self) -> Iterator[TransferHandle]:
        sources = self._sources

        class Late(TransferHandle):
            def finish(self) -> None:
                assert sources.pop()() is not None, "let go of before it was read"

        yield Late()


def test_what_a_copy_reads_is_held_until_it_has_been_read() -> None:
    arrays = [random(3, 4).numpy() for _ in range(6)]
    entry = Entry(0.5, tuple(CachedBlock(hidden=StoredTensor(torch.from_numpy(array))) for array in arrays))
    moving = copies(Far([weakref.ref(array) for array in arrays]))
    del arrays
    hosted = moving.take(entry)
    del entry
    moving.finish([hosted])


@pytest.mark.parametrize("bits", [EXACT, 8, 4])
def test_every_byte_arrives(bits: int) -> None:
    parts = [store(random(tokens, 16).bfloat16(), bits) for tokens in (1, 7, 1000)]
    entry = Entry(0.5, (CachedBlock(parts[0], parts[1]), CachedBlock(), CachedBlock(hidden=parts[2])))
    moving = copies(Device())
    hosted = moving.take(entry)
    moving.finish([hosted])
    assert hosted.level == 0.5
    assert [kept.cheapest for kept in hosted.blocks] == [kept.cheapest for kept in entry.blocks]
    assert all(torch.equal(*pair) for pair in zip(tensors(hosted), tensors(entry), strict=True))


def test_a_step_does_not_wait_for_its_entry_and_the_one_after_the_next_does() -> None:
    device = Slow()
    moving = copies(device)
    entries = [Entry(level, (CachedBlock(hidden=StoredTensor(random(3, 4))),)) for level in (0.9, 0.5)]
    first = moving.take(entries[0])
    assert not device.produced_before, "nothing has moved"
    device.gate.set()
    second = moving.take(entries[1])
    assert torch.equal(tensors(first)[0], tensors(entries[0])[0])
    assert device.produced_before >= 1
    moving.finish([first, second])
    assert torch.equal(tensors(second)[0], tensors(entries[1])[0])


def test_an_entry_that_did_not_arrive_is_told_of_whenever_its_run_ends() -> None:
    device = Slow(MemoryError("no buffers"))
    device.gate.set()
    moving = copies(device)
    lost = moving.take(Entry(0.5, (CachedBlock(hidden=StoredTensor(random(3, 4))),)))
    for _ in range(2):
        with pytest.raises(MemoryError):
            moving.finish([lost])
    moving.finish([])


def test_an_engine_reports_a_run_once_all_of_it_has_arrived() -> None:
    wanted = template(OF, steps=3)
    made = engine(OF)
    made.computing.hosting = copies(Device())
    spec = RecordingSpec(FORMS[0], EXACT)
    made.batch.submit([replace(tiny_flux.row(OF, Spec("run", grid=GRID, steps=3)), records=spec)])
    for found, entry in zip(finished(made)["run"].entries, wanted.entries, strict=True):
        assert all(torch.equal(*pair) for pair in zip(tensors(found), tensors(entry), strict=True))


def test_a_run_whose_entries_are_lost_fails_and_its_neighbours_do_not() -> None:
    device = Slow(MemoryError("no buffers"))
    device.gate.set()
    made = engine(OF)
    made.computing.hosting = copies(device)
    run, beside = (tiny_flux.row(OF, Spec(name, grid=GRID, steps=3)) for name in ("run", "beside"))
    made.batch.submit([replace(run, records=RecordingSpec(FORMS[0], EXACT)), beside])
    reports = list(iter(made.step, None))
    told = [(failure.row.key.job_id, failure.error.code) for report in reports for failure in report.failed]
    assert told == [("run", "row_poisoned")]
    assert [row.key.job_id for report in reports for row in report.advanced if row.done] == ["beside"]


@pytest.mark.parametrize("lost", [False, True])
def test_an_edit_ends_even_if_what_it_leaves_is_lost(lost: bool) -> None:
    """Otherwise all of it has arrived by then, though the last step records nothing."""
    device = Slow(MemoryError("no buffers") if lost else None)
    device.gate.set()
    spec = RecordingSpec(FORMS[0], EXACT, name="left")
    row = changed(edit(OF, None, Spec("edit", grid=GRID, steps=5)), renewed_every=3, records=spec)
    here, far = engine(OF), engine(OF)
    far.computing.hosting = copies(device)
    for made in (here, far):
        made.batch.submit([row])
    wanted, found = finished(here)["edit"], finished(far)["edit"]
    if lost:
        assert found.records is None
        return
    assert torch.equal(found.latent, wanted.latent)
    for one, other in zip(found.entries, wanted.entries, strict=True):
        assert all(torch.equal(*pair) for pair in zip(tensors(one), tensors(other), strict=True))
