"""UNets in the engine: recorded by template runs, served from entries, corrected, renewed, kept on disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.packed.packing import BlockInputs, CachedTokens
from giornata.planning.operations import StepCosts, TemplateRunScope
from giornata.scheduling.batch import RowKey
from giornata.wire.models import BORDER, MOMENTS
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.loading import Loader
from giornata_denoiser.engine.slabs import Device, Slabs
from giornata_denoiser.engine.step_budget import slab_bytes
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.families.sampling import FlowMatching, shifted_by_size
from giornata_denoiser.profiling.fitting import calibrate
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate, Entry
from giornata_denoiser.templates.runs import form_of, storage_budget
from giornata_lab.bench.compute import tiny_flux, tiny_unet
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_unet import Everything, RecordedUnetTokens, drawn
from giornata_lab.bench.compute.workload import multiplications
from tests.configs import configured
from tests.contract.messages import CARD
from tests.present import present
from tests.unit.denoiser.engine.edits import Measured, engine, finished
from tests.unit.denoiser.engine.test_masked import step
from tests.unit.denoiser.engine.test_unkept import Unkept

GRID = (4, 4)
WHERE = drawn("....", ".##.", "..#.", "....")
CLOSE = 1e-6
"""In float64; pages add corrections in float32."""
KV = frozenset({CacheForm.KV})


@cache
def family(fill: bool = False, dtype: torch.dtype = torch.float64) -> ModelFamily:
    """A tiny UNet; any schedule steps it."""
    network = tiny_unet.network("shallow", fill=fill, dtype=dtype)
    return ModelFamily(network.text, FlowMatching(tiny_flux.SCHEDULER, shifted_by_size), network)


def row(of: ModelFamily, job: str, *, steps: int = 4, seed: int = 0, scale: float | None = None) -> Row:
    network: Any = of.network
    positive, negative = (
        tiny_unet.picture(network, GRID, words=words, seed=seed + words) for words in (5, 3)
    )
    text = {**positive.text, **{f"negative_{name}": part for name, part in negative.text.items()}}
    return build_row(
        of,
        RowKey(job, 1, 0),
        grid=GRID,
        track=of.schedule.track(sampler=of.schedule.default_sampler, steps=steps, strength=1.0, cells=16),
        text=text,
        conditioning=positive.conditioning,
        guidance_scale=1.0,
        true_cfg_scale=scale,
    )


def template(of: ModelFamily, bits: int = EXACT, steps: int = 3) -> CachedTemplate:
    made = engine(of)
    made.batch.submit([replace(row(of, "run", steps=steps, seed=9), records=RecordingSpec(KV, bits))])
    return CachedTemplate("t", GRID, finished(made)["run"].entries)


def edit(of: ModelFamily, job: str, taken: CachedTemplate | None, **how: Any) -> Row:
    return changed(row(of, job, **how), region=WHERE, template=taken)


@dataclass
class Corrected:
    """What an entry kept of outside tiles, changed as the first step of the edit showed."""

    entry: Entry
    first: Entry
    seen: Everything | None
    keeps = False

    def _part(self, block: int, part: str, own: Tensor | None) -> Tensor:
        def kept(entry: Entry) -> Tensor:
            stored = present(entry.blocks[block].part(part))
            return stored.data[WHERE.outside]

        if own is None:
            return kept(self.entry)
        return kept(self.entry) + own.flatten(1)[WHERE.outside] - kept(self.first)

    def keys_values(self, block: int) -> DenseKV:
        own = (None, None) if self.seen is None else self.seen.heads[block]
        heads = family().specs[block].heads
        key, value = (self._part(block, part, of) for part, of in zip(("key", "value"), own, strict=True))
        return DenseKV(key.view(len(key), heads, -1), value.view(len(value), heads, -1))

    def hidden(self, block: int) -> Tensor:
        raise AssertionError("a UNet takes no block's input")

    def part(self, block: int, part: str) -> Tensor:
        return self._part(block, part, None if self.seen is None else self.seen.parts[block, part])


def nearest(taken: CachedTemplate, at: Row) -> Entry:
    return min(taken.entries, key=lambda entry: abs(entry.level - at.level))


def expected(of: ModelFamily, at: Row, taken: CachedTemplate, *, corrected: bool) -> Tensor:
    """The edit's final latent by a second implementation: every step from the entry of its noise level."""
    modes, first = (BlockMode.KV,) * of.depth, nearest(taken, at)
    seen: Sequence[Everything | None] = [None] * len(at.inputs.prompts)
    while not at.done:
        if corrected and not at.step:
            shown = [Everything() for _ in at.inputs.prompts]
            (latent,) = step(of, [at], [BlockInputs(recorder=each) for each in shown])
            seen = shown
        else:
            sources = [Corrected(nearest(taken, at), first, each) for each in seen]
            (latent,) = step(of, [at], [BlockInputs(CachedTokens(modes, source)) for source in sources])
        at = at.advanced(latent)
    return at.latent


@pytest.mark.parametrize(
    ("device", "scale", "corrected", "ahead"),
    [
        (Device(), 2.0, False, True),
        (Unkept(), 1.0, True, False),
    ],
)
def test_edits_take_from_the_entries_of_their_levels(
    device: Device, scale: float, corrected: bool, ahead: bool
) -> None:
    of = family()
    taken = template(of)
    rows = [
        edit(of, "a", taken, steps=5, seed=1, scale=scale),
        edit(of, "b", taken, steps=4, seed=2),
        row(of, "c", steps=3, seed=3),
    ]
    with Loader() as loader:
        made = engine(
            of,
            device=device,
            correction_bits=EXACT if corrected else None,
            loader=loader if ahead else None,
            model=Measured(),
        )
        made.batch.submit(rows)
        ended = finished(made)
    for each in rows[:2]:
        wanted = expected(of, each, taken, corrected=corrected)
        torch.testing.assert_close(ended[each.key.job_id].latent, wanted, atol=CLOSE, rtol=0)
    alone = engine(of)
    alone.batch.submit(rows[2:])
    torch.testing.assert_close(ended["c"].latent, finished(alone)["c"].latent, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("fill", [False, True])
def test_without_a_template_rows_take_what_their_last_step_in_full_made(fill: bool) -> None:
    of = family(fill)
    renewing = changed(edit(of, "a", None, steps=6, seed=1, scale=2.0), renewed_every=3)
    wanted, seen = renewing, list[Everything]()
    while not wanted.done:
        if wanted.step % 3 == 0:
            seen = [Everything() for _ in wanted.inputs.prompts]
            uses = [BlockInputs(recorder=each) for each in seen]
        else:
            modes = (BlockMode.KV,) * of.depth
            uses = [BlockInputs(CachedTokens(modes, RecordedUnetTokens(each, WHERE))) for each in seen]
        wanted = wanted.advanced(step(of, [wanted], uses)[0])
    made = engine(of, correction_bits=EXACT)
    made.batch.submit([replace(renewing, records=RecordingSpec(KV, EXACT))])
    ended = finished(made)["a"]
    torch.testing.assert_close(ended.latent, wanted.latent, atol=CLOSE, rtol=0)
    # What it leaves for the picture's next edits: what its steps in full were, of the unguided half.
    assert [entry.level for entry in ended.entries] == renewing.track.levels[[0, 3]].tolist()
    for (block, part), shown in seen[-1].parts.items():
        stored = present(ended.entries[-1].blocks[block].part(part))
        torch.testing.assert_close(stored.data, shown.flatten(1), atol=CLOSE, rtol=0)


def test_values_in_bits_are_near_and_statistics_exact() -> None:
    of = family()
    exact, coarse = template(of), template(of, bits=8)
    for kept, other in zip(exact.entries[0].blocks, coarse.entries[0].blocks, strict=True):
        assert [part.bits for part in other.parts] == [
            0 if other.moments is part else 8 for part in other.parts
        ]
        if kept.moments is not None and other.moments is not None:
            assert torch.equal(kept.moments.data, other.moments.data)
    assert coarse.size_bytes < exact.size_bytes / 3
    near = []
    for taken in (exact, coarse):
        made = engine(of, correction_bits=None)
        made.batch.submit([edit(of, "a", taken, seed=1)])
        near.append(finished(made)["a"].latent)
    assert 0 < (near[0] - near[1]).abs().max() < 0.05


def test_half_precision_keeps_statistics_in_float32() -> None:
    of = family(dtype=torch.bfloat16)
    taken = template(of)
    found = [kept.moments for kept in taken.entries[0].blocks if kept.moments is not None]
    assert {part.data.dtype for part in found} == {torch.float32}
    slabs = Slabs(taken.entries[0], WHERE, len(WHERE.computed), of)
    moments, border = (slabs.part(block, part) for block, part in ((0, MOMENTS), (1, BORDER)))
    assert (moments.dtype, border.dtype) == (torch.float32, torch.bfloat16)
    made = engine(of, correction_bits=8)
    made.batch.submit([edit(of, "a", taken, seed=1)])
    assert finished(made)["a"].latent.isfinite().all()


def test_slabs_are_as_large_as_they_say() -> None:
    of = family()
    slabs = Slabs(template(of).entries[0], WHERE, len(WHERE.computed), of)
    sizes, moving = slabs.sizes(BlockMode.KV).tolist(), slabs.moving(BlockMode.KV).tolist()
    for block, spec in enumerate(of.specs):
        if spec.heads:
            taken = slabs.keys_values(block)
            assert isinstance(taken, DenseKV)
            assert sizes[block] == taken.key.nbytes + taken.value.nbytes
            own = taken.key[: taken.room].nbytes + taken.value[: taken.room].nbytes
            assert moving[block] == sizes[block] - own
        else:
            assert sizes[block] == moving[block] == slabs.part(block, next(iter(spec.parts))).nbytes


@pytest.mark.parametrize(
    ("budget_mb", "bits", "kept"),
    [
        (100, 0, (10, 0, 0)),
        (8, 0, (10, 0, 8)),
        (3, 8, (10, 0, 4)),
        (2, 8, (7, 0, 4)),
        (1, 8, None),
    ],
)
def test_a_budget_costs_bits_then_levels_and_never_blocks(
    budget_mb: int, bits: int, kept: tuple[int, int, int] | None
) -> None:
    config = configured(DenoiserConfig, model="tiny", template_bits=bits, template_memory_mb=budget_mb)
    of = family()
    found, chosen = storage_budget(config, of, 64, 10)
    if kept is None:
        assert found.first_block == of.depth
    else:
        assert (found, chosen) == (TemplateRunScope(*kept[:2]), kept[2])


def test_blocks_without_an_input_to_keep_keep_keys_and_values() -> None:
    config = DenoiserConfig(model="tiny", template_form=CacheForm.HIDDEN)
    assert form_of(config, family()) is CacheForm.KV
    assert form_of(config, tiny_flux.family()) is CacheForm.HIDDEN


def test_its_costs_are_measured_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepMeter, "step_ms", lambda of, step: multiplications(step.work(of.operations)))
    monkeypatch.setattr(StepMeter, "load_ms", lambda of, size: of.load_bytes(size))
    checkpoint: Any = SimpleNamespace(card=CARD, family=family(dtype=torch.float32))
    found, operations = calibrate(checkpoint, 8), checkpoint.family.operations
    rates = StepCosts(found.compute.weights).rates(operations)
    assert (rates >= 0).all()
    assert rates.sum() > 0


def test_a_region_is_needed_to_take() -> None:
    of = family()
    at = row(of, "a")
    with pytest.raises(ValueError, match="has no region"):
        step(
            of,
            [at],
            [BlockInputs(CachedTokens((BlockMode.KV,) * of.depth, RecordedUnetTokens(Everything(), WHERE)))],
        )


@pytest.mark.parametrize("bits", [EXACT, 8])
def test_slabs_of_a_unet_are_counted_as_they_are_held(bits: int) -> None:
    """Keys and values have room for the row's own; borders and moments have none, and moments stay float32."""
    of = family(dtype=torch.bfloat16)
    recording = template(of, bits)
    taken, held = edit(of, "edit", recording, scale=2.0), 0
    for own in taken.own_tokens:
        slabs = Slabs(recording.entries[0], WHERE, own, of)
        for block, spec in enumerate(of.specs):
            if spec.heads:
                attended = slabs.gathered(block)
                held += attended.key.nbytes + attended.value.nbytes
            else:
                held += slabs.part(block, next(iter(spec.parts))).nbytes
    assert slab_bytes(taken, of.dtype.itemsize) == held > 0
