"""On the model that ships, a hit and a miss give the same picture, as far as the decision record says they do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec
from giornata_tools.quality import cases, metrics
from tests.bench.compute.bench_model import BenchModel, Request, box_of
from tests.bench.compute.setting import DEFAULT, Setting
from tests.bench.reuse_quality import MODEL

STEPS = 6
EDITS = 2
LEAST = 0.97


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


def inside(model: BenchModel, requests: list[Request], setting: Setting) -> list[float]:
    """SSIM of a hit to a miss in every mask's box."""
    missed = [model.edit(request, setting.halo) for request in requests]
    recording = RecordingSpec(frozenset({setting.form}), setting.bits)
    hits = [
        replace(
            row,
            region=model.region(row, setting.halo),
            template=model.template(request, recording, setting.levels),
        )
        for request, row in zip(requests, missed, strict=True)
    ]
    for hit, miss in zip(hits, missed, strict=True):
        assert torch.equal(hit.conditioning["noise"], miss.conditioning["noise"])
        assert hit.computed_tokens < miss.computed_tokens
    options = ReuseOptions(correction_bits=setting.correction_bits)
    pictures = [[model.decode(row) for row in model.run(rows, options)] for rows in (hits, missed)]
    boxes = [box_of(request.mask) for request in requests]
    return [metrics.ssim(a, b, box) for a, b, box in zip(*pictures, boxes, strict=True)]


def test_a_hit_gives_the_picture_of_a_miss(model: BenchModel, requests: list[Request]) -> None:
    corrected = inside(model, requests, DEFAULT)
    assert min(corrected) > LEAST
    assert np.mean(corrected) > np.mean(inside(model, requests, replace(DEFAULT, corrected=False)))
