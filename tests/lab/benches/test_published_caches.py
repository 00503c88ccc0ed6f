"""TeaCache and the cache like FISEdit beside what is known of them by hand, and beside diffusers' transformer."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from giornata_denoiser.choices import EXACT, CacheForm
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.bench_model import (
    BenchModel,
    Request,
    TeaCache,
    TeaCachePolynomial,
    calibrate,
    differing,
    fisedit_like,
    relative_l1,
    with_teacache,
)
from giornata_lab.bench.compute.rows import changed
from giornata_lab.bench.reuse_quality import MODEL
from giornata_lab.model.fill import beside_tokens

STEPS = 4
SIDE = 64
GUIDANCE = 30.0


@pytest.fixture(scope="module")
def model() -> BenchModel:
    return BenchModel(MODEL, steps=STEPS, guidance=GUIDANCE)


@pytest.fixture(scope="module")
def request_() -> Request:
    image = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    mask = np.zeros((SIDE, SIDE), bool)
    mask[8:32, 8:32] = True
    return Request("any", image, mask, "a red star", 3)


@pytest.fixture(scope="module")
def row(model: BenchModel, request_: Request) -> Row:
    return model.edit(request_, None)


@pytest.fixture(scope="module")
def cached(model: BenchModel, request_: Request, row: Row) -> CachedTemplate:
    spec, noise = RecordingSpec(frozenset({CacheForm.KV}), EXACT), row.inputs.conditioning["noise"]
    return model.template(request_, spec, STEPS, noise=noise)


def test_steps_are_computed_where_their_rescaled_distances_reach_the_threshold() -> None:
    """Distances 0.1, rescaled to 0.2: the third reaches 0.5. The step after a computed one begins at 0 again."""
    rule = TeaCache(TeaCachePolynomial((2.0, 0.0)), 0.5)
    steps = 9
    for _ in range(2):  # of a second row the first step is computed, whatever the first one left
        inputs = [torch.tensor([1.0, -1.0]) * 1.1**step for step in range(steps)]
        found = [rule.computes(each, step, steps) for step, each in enumerate(inputs)]
        assert found == [True, False, False, True, False, False, True, False, True]
    assert rule.computed == 2 * found.count(True)


def test_with_a_threshold_of_0_nothing_differs(model: BenchModel, row: Row) -> None:
    (plain,), (other,) = model.run([row]), with_teacache(model, TeaCache()).run([row])
    assert torch.equal(other.latent, plain.latent)


def test_a_skipped_step_adds_what_the_blocks_added_before(model: BenchModel, row: Row) -> None:
    skipping = with_teacache(model, TeaCache(threshold=math.inf))
    network: Any = skipping.family.network
    transformer, first = network.transformer, skipping.begun(row, 1)
    second = skipping.begun(first, 1)
    seen: dict[str, Any] = {}
    hooks = [
        transformer.x_embedder.register_forward_hook(lambda _, __, out: seen.update(entering=out)),
        transformer.norm_out.register_forward_pre_hook(lambda _, given: seen.update(leaving=given[0])),
    ]
    prompt, given = row.inputs.prompts[0], row.inputs.conditioning
    assert prompt.pooled is not None
    text = prompt.embeds[None], prompt.pooled[None]

    def velocity(latent: torch.Tensor, level: float) -> torch.Tensor:
        beside = beside_tokens(
            latent[None],
            text,
            time=torch.tensor([level]),
            guidance=torch.tensor([GUIDANCE]),
            corner=(0, 0),
        )
        image = torch.cat((latent, given["masked_image_latents"], given["mask"]), dim=1)
        with torch.inference_mode():
            found: torch.Tensor = transformer(hidden_states=image[None], **beside)[0][0]
        return found

    levels = row.track.levels.tolist()
    velocity(row.latent, levels[0])
    residual = seen["leaving"] - seen["entering"]
    hooks.append(
        transformer.norm_out.register_forward_pre_hook(
            lambda _, given: (seen["entering"] + residual, given[1])
        )
    )
    expected = first.latent + (levels[2] - levels[1]) * velocity(first.latent, levels[1])
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(second.latent, expected, rtol=0, atol=1e-5)


def test_the_polynomial_is_fitted_to_how_far_outputs_are_apart(
    model: BenchModel, request_: Request, row: Row
) -> None:
    rule = TeaCache()
    computing = with_teacache(model, rule)
    rows, levels = [row], row.track.levels.tolist()
    for _ in range(3):
        rows.append(computing.begun(rows[-1], 1))
    outputs = [
        (after.latent - before.latent) / (levels[after.step] - levels[before.step])
        for before, after in pairwise(rows)
    ]
    expected = [relative_l1(after, before) for before, after in pairwise(outputs)]
    assert [pair[1] for pair in rule.pairs] == pytest.approx(expected, abs=1e-4)
    fit = calibrate(model, [row, model.edit(replace(request_, seed=4), None)])
    assert fit.pairs == 2 * (STEPS - 1)
    assert fit.at(rule.pairs[0][0]) == pytest.approx(expected[0], rel=0.5)


def test_tokens_are_computed_that_differ_by_a_share_of_the_largest_difference(
    row: Row, cached: CachedTemplate
) -> None:
    known, step = changed(row, template=cached), 2
    picture, noise = known.picture_at(step), row.inputs.conditioning["noise"]
    assert picture is not None
    away = torch.zeros_like(picture)
    away[3], away[7], away[9] = -1.0, 0.5, 0.25
    begun = changed(row, step=step, latent=row.track.noised(picture + away, noise, step))
    found = differing(begun, cached, 0.3)
    assert found is not None
    assert found.computed.tolist() == [3, 7]
    assert differing(begun, cached, 0.0) is None


def test_the_others_are_the_cached_runs(model: BenchModel, row: Row, cached: CachedTemplate) -> None:
    (plain,) = model.run([row])
    assert torch.equal(fisedit_like(model, row, cached, 0.0, 1).latent, plain.latent)
    some = fisedit_like(model, row, cached, 0.5, 1)
    assert some.region is not None
    outside = some.region.outside
    assert 0 < len(outside) < row.image_tokens
    assert not torch.equal(some.latent, plain.latent)
    torch.testing.assert_close(
        some.latent[outside], row.inputs.conditioning["image_latents"][outside], rtol=0, atol=0.1
    )
