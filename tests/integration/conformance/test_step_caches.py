"""Rows with step caches end as diffusers' pipelines do with `enable_cache`; in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest
import torch
from diffusers import TaylorSeerCacheConfig

from giornata_denoiser.rows.parts import TaylorRule
from tests.distances import distance
from tests.fakes.step_caches import taylor
from tests.integration.conformance.families import Asked, OpenFamily
from tests.integration.conformance.test_families import guided, plain
from tests.integration.painting import final_latent

CLOSE: Final = 1e-5
"""Largest difference, relative to the largest value."""


@contextmanager
def caching(transformer: Any, rule: TaylorRule) -> Iterator[None]:
    """Inside, pipelines run the transformer with a cache by this rule."""
    transformer.enable_cache(
        TaylorSeerCacheConfig(
            cache_interval=rule.steps.interval,
            disable_cache_before_step=rule.steps.warmup,
            max_order=rule.order,
            taylor_factors_dtype=torch.float64,
            use_lite_mode=True,
        )
    )
    try:
        yield
    finally:
        transformer.disable_cache()


@pytest.mark.parametrize(
    ("name", "asked", "rule"),
    [
        ("flux-inpaint", {"steps": 16, "strength": 0.6}, taylor(5, 1, 3)),
        ("flux-fill", {"steps": 12}, taylor(3, 2, 4)),
        ("flux-fill", {"steps": 14, "strength": 0.6}, taylor(2, 0, 1)),
    ],
)
def test_an_edit_equals_the_pipeline(
    name: str, asked: dict[str, Any], rule: TaylorRule, exact_family: Callable[[str], OpenFamily]
) -> None:
    of = exact_family(name)
    request = plain(of, **asked)
    row = of.edit(request)
    transformer = of.pipeline.transformer
    # Inpainting pipelines set no context of a cache: one for each run is given.
    with caching(transformer, rule), transformer.cache_context("run"):
        theirs = of.inpainted(request, row).latents
    assert_equals(of, row, rule, theirs)


def test_both_sequences_of_guidance_have_a_cache_of_their_own(
    exact_family: Callable[[str], OpenFamily],
) -> None:
    of, rule = exact_family("flux-inpaint"), taylor(4, 1, 3)
    request: Asked = guided(of, steps=12)
    with caching(of.pipeline.transformer, rule):
        theirs = of.generated(request).latents
    assert_equals(of, of.generation(request), rule, theirs)


def assert_equals(of: OpenFamily, row: Any, rule: TaylorRule, theirs: torch.Tensor) -> None:
    """The latents are the pipeline's, and those of a row whose steps are all computed are others."""
    mine = final_latent(of.served, replace(row, step_cache=rule))
    assert distance(mine, theirs) <= CLOSE
    assert distance(mine, final_latent(of.served, row)) > 100 * CLOSE
