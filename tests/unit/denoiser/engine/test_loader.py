"""Loading ahead: the same pictures, slabs in the order of their use, nobody left waiting."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from giornata.packed.region import region
from giornata.scheduling.batch import Capacity
from giornata.wire.values import BlockMode
from giornata_denoiser.blocks.recording import EntryRecorder
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.loading import FinishedSlabLoad, Loader, SlabRun
from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Entry
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.patience import HUNG_S

BLOCKS = 4
KV = (BlockMode.KV,) * BLOCKS


def entry(level: float = 0.5, blocks: int = BLOCKS) -> Entry:
    recorder = EntryRecorder(level, blocks, RecordingSpec(frozenset({CacheForm.KV}), 8))
    for block in range(blocks):
        recorder.keys_values(block, torch.randn(6, 4, 16), torch.randn(6, 4, 16))
    return recorder.entry()


def slabs(of: Entry) -> Slabs:
    where = region(torch.tensor([[True, False, False], [False, False, False]]))
    assert where is not None
    return Slabs(of, where, own=2, family=tiny_flux.family())


def entry_of(of: ModelFamily) -> Entry:
    run = tiny_flux.row(of, Spec("t", grid=(4, 4), steps=1))
    return done([replace(run, records=RecordingSpec(frozenset({CacheForm.KV}), 8))], None)["t"].entries[0]


def done(rows: list[Row], loader: Loader | None) -> dict[str, Row]:
    made = Engine(tiny_flux.family(), Capacity(8, 10_000), lambda: 0.0, reusing=ReuseOptions(loader))
    made.batch.submit(rows)
    ended: dict[str, Row] = {}
    while (report := made.step()) is not None:
        assert report.failed == ()
        ended |= {row.key.job_id: row for row in report.advanced if row.done}
    return ended


def test_loading_ahead_changes_no_picture() -> None:
    of = tiny_flux.family()
    run = replace(
        tiny_flux.row(of, Spec("t", grid=(4, 4), steps=3)),
        records=RecordingSpec(frozenset({CacheForm.KV}), 8),
    )
    template = CachedTemplate("t", (4, 4), done([run], None)["t"].entries)
    where = region(torch.eye(4, dtype=torch.bool))
    rows = [
        replace(tiny_flux.row(of, spec), region=where, template=template)
        for spec in (
            Spec("a", grid=(4, 4), steps=5, seed=1),
            Spec("b", grid=(4, 4), steps=7, true_cfg_scale=2.0, seed=2),
        )
    ]
    heard: list[FinishedSlabLoad] = []
    with Loader(on_loaded=heard.append) as loader:
        ahead = done(rows, loader)
    inline = done(rows, None)
    assert all(torch.equal(ahead[name].latent, inline[name].latent) for name in "ab")
    # Three entries, each gathered once for a's one sequence and once for each of b's two.
    assert len(heard) == 3 * BLOCKS * 3
    first = [load.load.block for load in heard[: 3 * BLOCKS]]
    assert first == sorted(first)


def test_equal_regions_share_slabs_where_nothing_is_corrected() -> None:
    of = tiny_flux.family()
    taken = CachedTemplate("t", (4, 4), (entry_of(of),))
    where = region(torch.eye(4, dtype=torch.bool))
    rows = [
        replace(tiny_flux.row(of, Spec(name, grid=(4, 4), steps=2, seed=seed)), region=where, template=taken)
        for seed, name in enumerate("ab")
    ]
    heard: list[FinishedSlabLoad] = []
    with Loader(on_loaded=heard.append) as loader:
        made = Engine(
            of, Capacity(8, 10_000), lambda: 0.0, reusing=ReuseOptions(loader, correction_bits=None)
        )
        made.batch.submit(rows)
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
