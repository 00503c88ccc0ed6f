"""Rows with step caches equal diffusers' pipelines with `enable_cache`, through a checkpoint on disk; in float64."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from diffusers import TaylorSeerCacheConfig
from torch import Tensor

from giornata_denoiser.rows.step_cache import TaylorRule
from tests.fakes.step_caches import taylor
from tests.integration.denoiser.oracle import (
    Edit,
    Model,
    cached_latent,
    conditioning,
    diffusers_latent,
    generated_latent,
    noise,
)

TOLERANCE = 1e-5
EDITS = [Edit(steps=20), Edit(steps=24, strength=0.6, guidance_scale=30.0, width=64, height=112)]


@contextmanager
def caching(model: Model, config: Any) -> Iterator[None]:
    transformer = model.pipeline.transformer
    transformer.enable_cache(config)
    try:
        yield
    finally:
        transformer.disable_cache()


def edited(model: Model, edit: Edit, config: Any) -> Tensor:
    """What diffusers ends with. Its inpainting pipelines set no context of a cache: one for each run is given."""
    with caching(model, config), model.pipeline.transformer.cache_context("run"):
        return diffusers_latent(model, edit)


def in_lite_mode(rule: TaylorRule, dtype: torch.dtype) -> TaylorSeerCacheConfig:
    return TaylorSeerCacheConfig(
        cache_interval=rule.steps.interval,
        disable_cache_before_step=rule.steps.warmup,
        max_order=rule.order,
        taylor_factors_dtype=dtype,
        use_lite_mode=True,
    )


@pytest.mark.parametrize(
    ("rule", "fills", "edit"),
    [
        (taylor(5, 1, 3), False, EDITS[1]),
        (taylor(3, 2, 4), True, EDITS[0]),
        (taylor(2, 0, 1), True, EDITS[1]),
    ],
)
def test_taylorseer_equals_diffusers(
    inpaint: Model, fill: Model, edit: Edit, rule: TaylorRule, *, fills: bool
) -> None:
    model = fill if fills else inpaint
    mine, steps = cached_latent(model, edit, conditioning(model, edit), rule)
    theirs = edited(model, edit, in_lite_mode(rule, model.dtype))
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
    evaluations = model.checkpoint.family.schedule.track(
        sampler=model.checkpoint.family.schedule.default_sampler,
        steps=edit.steps,
        strength=edit.strength,
        cells=edit.grid[0] * edit.grid[1],
    ).steps
    assert len(steps) == evaluations - rule.steps.skipped(evaluations) < evaluations
    exact, _ = cached_latent(model, edit, conditioning(model, edit), None)
    assert (mine - exact).abs().max() > 100 * TOLERANCE, "the cache changes nothing"


def test_both_sequences_of_guidance_have_a_cache_of_their_own(inpaint: Model) -> None:
    edit, model, rule = Edit(steps=20, true_cfg_scale=2.5), inpaint, taylor(4, 1, 3)
    mine, _ = cached_latent(model, edit, noise(model, edit), rule)
    with caching(model, in_lite_mode(rule, model.dtype)):
        theirs = generated_latent(model, edit)
    torch.testing.assert_close(mine, theirs, atol=TOLERANCE, rtol=0)
