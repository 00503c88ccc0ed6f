"""Driven families in the engine: whole edits equal diffusers' forward step by step, with templates and without."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from giornata.packed.attention import CachedKVRecorder, DenseKV, KVPages
from giornata.packed.packing import BlockInputs, CachedTokens, make_region, with_companions
from giornata.planning.operations import SequenceShape
from giornata.wire.values import BlockMode
from giornata_denoiser.choices import EXACT as AS_COMPUTED
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.recorders import OwnKeysValues
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.profiling.fitting import activation_bytes
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import RowSize, StepShape
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.fakes import tiny_driven
from tests.present import present
from tests.unit.denoiser.engine.edits import engine, finished
from tests.unit.denoiser.families.test_driven import DIFFERENT

EXACT = 1e-5
GRID = (4, 5)
TOUCHED = (6, 7, 11, 12)
SCALE = 2.5


def edit(of: ModelFamily, spec: Spec) -> Row:
    """A row whose mask is 1 in a few tokens, computed in full."""
    row = tiny_driven.row(of, replace(spec, grid=GRID))
    mask = torch.zeros_like(row.inputs.conditioning["mask"])
    mask[list(TOUCHED)] = 1.0
    row = changed(row, conditioning={**row.inputs.conditioning, "mask": mask})
    return replace(row, latent=torch.lerp(row.inputs.conditioning["image_latents"], row.latent, mask))


def masked(row: Row) -> Row:
    touched = torch.zeros(GRID, dtype=torch.bool)
    touched.view(-1)[list(TOUCHED)] = True
    found = present(make_region(touched))
    return replace(row, region=with_companions(found, row.inputs.companions))


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_miss_takes_what_its_own_step_in_full_made(name: str) -> None:
    of = tiny_driven.family(name)
    row = changed(masked(edit(of, Spec("miss", steps=3, true_cfg_scale=SCALE, seed=5))), renewed_every=3)
    made = engine(of)
    recording = RecordingSpec(frozenset({CacheForm.KV}), AS_COMPUTED)
    made.batch.submit([replace(row, records=recording)])
    ended = finished(made)["miss"]
    latent = ended.latent
    assert [len([*block.parts]) for block in ended.entries[0].blocks] == [2] * of.depth
    assert len(ended.entries) == row.steps_in_full == 1
    kept = [OwnKeysValues(present(row.region).outside, own) for own in row.own_tokens]
    uses = [BlockInputs(recorder=CachedKVRecorder(one)) for one in kept]
    with torch.no_grad():
        for _ in range(row.steps):
            stepped = denoise_step(of, assemble(of, [row]), [row], uses)
            row = row.advanced(stepped[0].latent)
            uses = [BlockInputs(CachedTokens((BlockMode.KV,) * of.depth, one)) for one in kept]
    torch.testing.assert_close(latent, row.latent, atol=EXACT, rtol=0)


@pytest.mark.parametrize(("name", "bits"), list(zip(DIFFERENT, cycle([8, 4]), strict=False)))
def test_pages_are_attended_to_as_what_they_hold(name: str, bits: int) -> None:
    """As on a GPU: keys and values are gathered where a block attends, those of several attentions together."""
    of = tiny_driven.family(name)
    row = masked(edit(of, Spec("edit", steps=3, seed=6)))
    stored, plain = (
        OwnKeysValues(present(row.region).outside, row.own_tokens[0], kept) for kept in (bits, None)
    )
    latents = []
    with torch.no_grad():
        denoise_step(of, assemble(of, [row]), [row], [BlockInputs(recorder=CachedKVRecorder(stored))])
        denoise_step(of, assemble(of, [row]), [row], [BlockInputs(recorder=CachedKVRecorder(plain))])
        for block in range(of.depth):
            outside, pages = plain.keys_values(block), stored.keys_values(block)
            assert isinstance(outside, DenseKV)
            assert isinstance(pages, KVPages)
            for mine, theirs in zip((outside.key, outside.value), pages.rows(), strict=True):
                held = theirs.view(len(theirs), *mine.shape[1:]).to(mine.dtype)
                assert not torch.equal(mine[row.own_tokens[0] :], held)
                mine[row.own_tokens[0] :] = held
        for kept in (stored, plain):
            use = BlockInputs(CachedTokens((BlockMode.KV,) * of.depth, kept))
            latents.append(denoise_step(of, assemble(of, [row]), [row], [use])[0].latent)
    torch.testing.assert_close(latents[0], latents[1], atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["flux2", "flux2-klein", "z-image", "flux2-klein-kv", "qwen-image-2.1"])
def test_a_meter_measures_rows_with_what_stands_beside_them(name: str) -> None:
    of = tiny_driven.family(name)
    card = SimpleNamespace(embedded_guidance_scale=0.0, max_text_tokens=32)
    checkpoint: Any = SimpleNamespace(family=of, card=card)
    meter = StepMeter(checkpoint, AS_COMPUTED)
    text = meter.text_tokens
    part = RowSize(*GRID, text, (BlockMode.KV,) * of.depth, ratio=0.2).beside(meter.companions, meter.prefix)
    whole = RowSize(*GRID, text, (BlockMode.FULL,) * of.depth).beside(meter.companions, meter.prefix)
    for size in (part, whole):
        assert size.shapes == meter.row(size, 0).shapes
    assert part.companions == of.network.companions(GRID)
    assert part.companions + part.prefix > 0
    assert meter.step_ms(StepShape((part, whole))) > 0
    outside = part.shapes[0].image - part.shapes[0].computed
    assert meter.load_bytes(part) == of.dtype.itemsize * outside * of.specs[0].channels([BlockMode.KV])


@pytest.mark.parametrize("name", ["flux2", "flux2-klein", "z-image"])
def test_rows_tell_what_their_companions_cost(name: str) -> None:
    """A step in full computes them, a masked one takes them."""
    of = tiny_driven.family(name)
    row = edit(of, Spec("edit", steps=3))
    part = changed(masked(row), renewed_every=3, degree=1, step=1)
    text, cells = row.inputs.prompts[0].joint_tokens, GRID[0] * GRID[1]
    both = cells + of.network.companions(GRID)
    assert (row.block_tokens, row.tokens, row.shapes) == (
        both,
        text + both,
        (SequenceShape(text, both, both),),
    )
    assert (part.tokens, part.shapes) == (text + len(TOUCHED), (SequenceShape(text, both, len(TOUCHED)),))


def test_memory_is_measured_of_two_rows_too() -> None:
    """Modulation of rows of two lengths is spread to their tokens; that of a row alone is broadcast."""
    of = tiny_driven.family("qwen-image")
    checkpoint: Any = SimpleNamespace(
        family=of, card=SimpleNamespace(embedded_guidance_scale=0.0, max_text_tokens=8)
    )
    meter = StepMeter(checkpoint, AS_COMPUTED)
    one = StepShape((RowSize(8, 8, 8, (BlockMode.FULL,) * of.depth),))
    two = StepShape(one.rows * 2)
    (alone, same), (both, even) = (activation_bytes(meter, steps) for steps in ([one], [one, two]))
    assert alone == same
    assert both > 1.2 * even
    assert even == pytest.approx(alone, rel=0.05)
