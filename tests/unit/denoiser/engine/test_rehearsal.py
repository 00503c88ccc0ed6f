"""The rehearsal: a model that computes passes, one that does not never serves."""

from __future__ import annotations

import pytest
import torch

from giornata import families
from giornata.wire.errors import Failed, RowPoisoned
from giornata.wire.models import ModelCard
from giornata_denoiser.checkpoint import Checkpoint
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.families.flux.checkpoints import FluxInpaint
from giornata_denoiser.families.preview_map import PreviewMap
from tests.fakes import tiny_flux

CARD = ModelCard(
    name="m", family=families.Family.FLUX_FILL, digest="d", vae_scale_factor=8, latent_channels=16,
    max_text_tokens=48, takes_guidance=True, takes_true_cfg=False, default_steps=4, default_guidance_scale=30.0,
    default_strength=1.0,
)  # fmt: skip

PREVIEW_MAP = PreviewMap(torch.zeros(16, 3), torch.zeros(3))


@pytest.mark.parametrize("fill", [False, True])
def test_a_model_that_computes_passes(fill: bool) -> None:
    rehearse(Checkpoint(CARD, tiny_flux.family(fill=fill), PREVIEW_MAP))


def test_a_model_whose_results_are_not_finite_is_refused() -> None:
    network = FluxInpaint(tiny_flux.transformer())
    network.transformer.proj_out.weight[0, 0] = torch.nan
    with pytest.raises(Failed, match="cannot compute a picture") as caught:
        rehearse(Checkpoint(CARD, tiny_flux.family(network), PREVIEW_MAP))
    assert isinstance(caught.value.__cause__, RowPoisoned)
