"""On the model that ships, edits that reuse give the picture of full computation, as far as the records say they do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from giornata.packed.packing import unite_regions
from giornata.planning.cost_model import refresh_interval
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families import network
from giornata_denoiser.rows.row import RecordingSpec
from giornata_denoiser.rows.template import CachedTemplate
from giornata_denoiser.templates.runs import LEVELS_TOGETHER
from giornata_lab.bench.compute.bench_model import BenchModel, Request
from giornata_lab.bench.compute.engines import DEFAULT, BenchSetting
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.reuse_quality import KEPT_FOR, MODEL
from giornata_lab.quality import cases
from giornata_tools.lora_profiler.probes import box_of
from giornata_tools.lora_profiler.profiler import ssim

STEPS = 6
EDITS = 2
LEAST = 0.97
UNET_STEPS = 8
UNET_LEAST = 0.95


@pytest.fixture(scope="module")
def model() -> BenchModel:
    return BenchModel(MODEL, steps=STEPS, guidance=30.0)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    slots = [slot for slot in cases.slots() if slot.side == 128]
    drawn = [(slot, cases.draw(slot).scene) for slot in cases.spread(slots, EDITS)]
    return [
        Request(slot.name, scene.before, np.asarray(scene.mask), scene.caption, slot.index)
        for slot, scene in drawn
    ]


def inside(model: BenchModel, requests: list[Request], setting: BenchSetting) -> list[float]:
    """SSIM of edits that take from templates, or from their own steps, to full computation in every mask's box."""
    full = [model.edit(request, setting.halo) for request in requests]
    recording = RecordingSpec(frozenset({setting.form}), setting.bits)
    reusing = [
        changed(
            row,
            region=model.region(request, setting.halo),
            template=None if setting.renewed_every else model.template(request, recording, setting.levels),
            renewed_every=setting.renewed_every,
            keeps_padding=setting.keeps_padding,
        )
        for request, row in zip(requests, full, strict=True)
    ]
    for some, every in zip(reusing, full, strict=True):
        assert torch.equal(some.inputs.conditioning["noise"], every.inputs.conditioning["noise"])
        assert some.computed_tokens < every.computed_tokens
    options = ReuseOptions(correction_bits=setting.correction_bits)
    pictures = [[model.decode(row) for row in model.run(rows, options)] for rows in (reusing, full)]
    boxes = [box_of(request.mask) for request in requests]
    return [ssim(a, b, box) for a, b, box in zip(*pictures, boxes, strict=True)]


def test_a_hit_gives_the_picture_of_full_computation(model: BenchModel, requests: list[Request]) -> None:
    corrected = inside(model, requests, DEFAULT)
    assert min(corrected) > LEAST
    assert np.mean(corrected) > np.mean(inside(model, requests, replace(DEFAULT, corrected=False)))


def test_a_miss_gives_it_too(model: BenchModel, requests: list[Request]) -> None:
    """Renewed in every third of six steps; of a single step in full, they would be further away."""
    renewed, never = (inside(model, requests, BenchSetting(renewed_every=every)) for every in (3, STEPS))
    assert min(renewed) > LEAST
    assert np.mean(renewed) > np.mean(never)


def left_by(model: BenchModel, request: Request) -> CachedTemplate:
    """What an edit without a template leaves."""
    row, where = model.edit(request, DEFAULT.halo), model.region(request, DEFAULT.halo)
    assert where is not None
    every = refresh_interval(row.steps, KEPT_FOR)
    spec = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
    (done,) = model.run([changed(row, region=where, renewed_every=every, records=spec)])
    return CachedTemplate("left", row.grid, done.entries, edited=where)


def test_the_next_edit_takes_what_a_miss_left(model: BenchModel, requests: list[Request]) -> None:
    """Prompt and mask differ. With what the miss repainted computed, the picture is nearer than without."""
    found = []
    for request, other in zip(requests, reversed(requests), strict=True):
        earlier = replace(request, prompt=other.prompt, mask=np.roll(request.mask, (16, 16), (0, 1)), seed=9)
        left = left_by(model, earlier)
        whole = model.edit(request, DEFAULT.halo)
        where = model.region(request, DEFAULT.halo)
        assert left.edited is not None
        assert where is not None
        either = unite_regions(where, left.edited)
        assert either is not None
        rows = [changed(whole, region=place, template=left) for place in (either, where)]
        options = ReuseOptions(correction_bits=DEFAULT.correction_bits)
        full, *pictures = [model.decode(row) for row in (*model.run([whole]), *model.run(rows, options))]
        found.append([ssim(picture, full, box_of(request.mask)) for picture in pictures])
    computed, taken = zip(*found, strict=True)
    assert min(computed) > LEAST
    assert np.mean(computed) > np.mean(taken)


def test_padding_may_be_kept_and_other_text_may_not(
    model: BenchModel, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = inside(model, requests, replace(DEFAULT, keeps_padding=True))
    assert min(kept) > LEAST
    monkeypatch.setattr(network, "padding_tokens", lambda mask: len(mask) - 1)
    assert np.mean(kept) > np.mean(inside(model, requests, replace(DEFAULT, keeps_padding=True)))


def test_a_hit_of_a_unet_gives_the_picture_of_full_computation(requests: list[Request]) -> None:
    """Guided, by the checkpoint's own sampler; with fewer noise levels recorded it is further away."""
    unet = BenchModel(MODEL.parent / "yardstick", steps=UNET_STEPS)
    hits, far = (inside(unet, requests, replace(DEFAULT, levels=levels)) for levels in (LEVELS_TOGETHER, 2))
    assert min(hits) > UNET_LEAST
    assert np.mean(hits) > np.mean(far)
