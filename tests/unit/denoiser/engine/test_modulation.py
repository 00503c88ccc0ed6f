"""Vectors of all steps at once are those that diffusers' norms make step by step, and no one else's."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from giornata.packed.flux.modulation import Modulation
from giornata_denoiser.engine.assembly import place
from giornata_denoiser.families.protocol import ModelFamily
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.precision import float32_bound

SPEC = Spec(steps=6, true_cfg_scale=2.0)


def stepwise(of: ModelFamily, step: int) -> list[Tensor]:
    """What every norm's linear layer makes of one step of both sequences, in the order of the forward."""
    row, model = tiny_flux.row(of, SPEC), cast("Any", of.network).transformer
    pooled = torch.stack([cast("Any", prompt).pooled for prompt in row.prompts])
    time = row.track.times[[step] * 2].to(of.dtype) / 1000 * 1000
    guidance = torch.full((2,), SPEC.guidance_scale).to(of.dtype) * 1000
    conditioning = model.time_text_embed(time, guidance, pooled)
    doubles = [norm for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    norms = [*doubles, *(block.norm for block in model.single_transformer_blocks), model.norm_out]
    return [norm.linear(norm.silu(conditioning)) for norm in norms]


def picked(of: ModelFamily, step: int) -> list[Tensor]:
    """The same, from what is prepared when the row joins."""
    row, model = tiny_flux.row(of, SPEC), cast("Any", of.network).transformer
    prepared = [cast("Tensor", sequence.prepared) for sequence in place(row, of).sequences]
    found = Modulation(model, prepared, [step] * 2)
    count = len(model.transformer_blocks)
    doubles = [vectors for block in range(count) for vectors in found.double(block)]
    singles = [found.single(count + block) for block in range(len(model.single_transformer_blocks))]
    shift, scale = found.output()
    return [torch.cat(vectors, dim=1) for vectors in (*doubles, *singles, (scale, shift))]


@pytest.mark.parametrize("step", [0, 5])
@torch.inference_mode()
def test_vectors_of_all_steps_are_those_of_each_step(step: int) -> None:
    exact = stepwise(tiny_flux.family(dtype=torch.float64), step)
    reference, found = stepwise(tiny_flux.family(), step), picked(tiny_flux.family(), step)
    double = picked(tiny_flux.family(dtype=torch.float64), step)
    for wanted, single, of_float, of_double in zip(exact, reference, found, double, strict=True):
        # A product of several rows may group its sums otherwise than the product of one.
        torch.testing.assert_close(of_float.double(), wanted, atol=float32_bound(single, wanted), rtol=0)
        torch.testing.assert_close(of_double, wanted, atol=1e-12, rtol=0)


@torch.inference_mode()
def test_what_is_prepared_is_the_sequences_own() -> None:
    of = tiny_flux.family()
    row = tiny_flux.row(of, SPEC)
    first, second = (cast("Tensor", sequence.prepared) for sequence in place(row, of).sequences)
    again = cast("Tensor", of.network.prepare(row.prompts[0], row.track.times, row.conditioning, ()))
    assert torch.equal(first, again)
    assert (first - second).abs().max() > 1e-3
    assert (first[0] - first[1]).abs().max() > 1e-3
