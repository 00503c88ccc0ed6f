"""What ControlNets add behind blocks of packed rows, beside diffusers' own transformer and a forward in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.uses import BlockInputs
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.assembly import assemble
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.test_masked import BLOCKS, DOUBLE, Everything, masked, reusing

CLOSE = 1e-5
WIDTH = 64


@dataclass
class Given:
    """Satisfies :class:`giornata.packed.uses.Residuals`."""

    samples: Sequence[Tensor | None]
    whole: bool = True

    def sample(self, block: int) -> Tensor | None:
        return self.samples[block]


def drawn(tokens: int, seed: int = 0, *, width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [0.5 * torch.randn(tokens, width, generator=generator) for _ in range(BLOCKS)]


def output(of: ModelFamily, rows: Sequence[Row], uses: Sequence[BlockInputs]) -> list[Tensor]:
    assembly = assemble(of, rows)
    latents = torch.cat([row.latent for row in rows])
    with torch.inference_mode():
        out = of.network.predict(
            assembly.batch, latents, assembly.conditioning, [row.step for row in rows], uses=uses
        )
    return list(torch.split(out, assembly.computed_lengths))


def by_diffusers(of: ModelFamily, row: Row, samples: Sequence[Tensor]) -> Tensor:
    prompt: Any = row.prompts[0]
    height, width = row.grid
    ids = torch.zeros(row.image_tokens, 3)
    ids[:, 1] = torch.arange(height).repeat_interleave(width)
    ids[:, 2] = torch.arange(width).repeat(height)
    network: Any = of.network
    with torch.inference_mode():
        velocity: Tensor = network.transformer(
            hidden_states=row.latent[None],
            encoder_hidden_states=prompt.embeds[None],
            pooled_projections=prompt.pooled[None],
            timestep=row.track.times[:1] / 1000,
            img_ids=ids,
            txt_ids=torch.zeros(len(prompt.embeds), 3),
            guidance=torch.tensor([prompt.guidance_scale]),
            controlnet_block_samples=[sample[None] for sample in samples[:2]],
            controlnet_single_block_samples=[sample[None] for sample in samples[2:]],
            return_dict=False,
        )[0][0]
    return velocity


def test_mixed_rows_with_and_without_residuals_equal_diffusers() -> None:
    of = tiny_flux.family()
    rows = [
        tiny_flux.row(of, Spec(f"{i}", grid=grid, seed=i)) for i, grid in enumerate([(3, 4), (4, 4), (2, 3)])
    ]
    samples = [drawn(row.image_tokens, i) for i, row in enumerate(rows)]
    uses = [BlockInputs(residuals=Given(samples[0])), BlockInputs(), BlockInputs(residuals=Given(samples[2]))]
    none = [torch.zeros_like(sample) for sample in samples[1]]
    packed = output(of, rows, uses)
    for mine, row, given in zip(packed, rows, (samples[0], none, samples[2]), strict=True):
        torch.testing.assert_close(mine, by_diffusers(of, row, given), atol=CLOSE, rtol=0)
    plain = output(of, rows[:1], [BlockInputs()])[0]
    assert (packed[0] - plain).abs().max() > 0.05, "the comparison sees residuals"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "modes",
    [
        (BlockMode.KV,) * 4,
        (BlockMode.HIDDEN,) * 4,
        (BlockMode.KV, BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN),
    ],
)
def test_the_compute_set_equals_the_forward_in_full(modes: tuple[BlockMode, ...], whole: bool) -> None:
    """Where what lies outside is taken from a forward with the same residuals; its blocks' inputs hold them."""
    of = tiny_flux.family(dtype=DOUBLE)
    row = masked(of, Spec(grid=(4, 5)), [6, 7, 11])
    assert row.region is not None
    samples = [sample.to(DOUBLE) for sample in drawn(row.image_tokens)]
    recorder = Everything()
    every = replace(row, region=None)
    (full,) = output(of, [every], [BlockInputs(recorder=recorder, residuals=Given(samples))])
    computed = row.region.computed
    given = Given(samples if whole else [sample[computed] for sample in samples], whole)
    (taken,) = reusing(row, [recorder], modes, room=False)
    (mine,) = output(of, [row], [replace(taken, residuals=given)])
    torch.testing.assert_close(mine, full[computed], atol=CLOSE, rtol=0)


def test_a_residual_of_a_region_needs_one() -> None:
    of = tiny_flux.family()
    row = tiny_flux.row(of, Spec())
    with pytest.raises(ValueError, match="has no region"):
        output(of, [row], [BlockInputs(residuals=Given(drawn(2), whole=False))])
