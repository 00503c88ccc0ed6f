"""A Flux checkpoint without distilled guidance equals diffusers' pipeline; the others are in the conformance suite."""

from __future__ import annotations

import pytest

from tests.distances import distance
from tests.integration.denoiser.oracle import Edit, Model, conditioning, diffusers_latent, engine_latent


@pytest.mark.parametrize("edit", [Edit(strength=0.6), Edit(true_cfg_scale=2.5)])
def test_a_checkpoint_without_distilled_guidance_equals_diffusers(undistilled: Model, edit: Edit) -> None:
    assert not undistilled.checkpoint.card.takes_guidance
    mine = engine_latent(undistilled, edit, conditioning(undistilled, edit))
    assert distance(mine, diffusers_latent(undistilled, edit)) <= 1e-5
