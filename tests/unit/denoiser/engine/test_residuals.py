"""Flux beside diffusers: residuals of ControlNets, ControlNets themselves, and modulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from giornata.packed import attention, elementwise
from giornata.packed.compute_set import BlockInputs, PackedBatch
from giornata.packed.flux import FluxComponents, FluxForward, FluxProjections, Modulation, prepare_modulation
from giornata.packed.low_rank import LowRankHooks
from giornata.packed.packing import UNTRACED, make_layout
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import JOINT_DIM, LATENT, POOLED_DIM, Spec
from tests.fakes import tiny_flux_control
from tests.precision import float32_bound
from tests.unit.denoiser.engine.test_masked import (
    BLOCKS,
    DOUBLE,
    OF,
    Everything,
    exact_family,
    masked,
    reusing,
)

# What ControlNets add behind blocks of packed rows, beside diffusers' own transformer and a forward in
# full.


CLOSE = 1e-5
WIDTH = 64


@dataclass
class Given:
    """Satisfies :class:`giornata.packed.compute_set.Residuals`."""

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


def ids(grid: tuple[int, int]) -> Tensor:
    found = torch.zeros(grid[0] * grid[1], 3)
    found[:, 1] = torch.arange(grid[0]).repeat_interleave(grid[1])
    found[:, 2] = torch.arange(grid[1]).repeat(grid[0])
    return found


def by_diffusers(of: ModelFamily, row: Row, samples: Sequence[Tensor]) -> Tensor:
    prompt: Any = row.inputs.prompts[0]
    network: Any = of.network
    with torch.inference_mode():
        velocity: Tensor = network.transformer(
            hidden_states=row.latent[None],
            encoder_hidden_states=prompt.embeds[None],
            pooled_projections=prompt.pooled[None],
            timestep=row.track.times[:1] / 1000,
            img_ids=ids(row.grid),
            txt_ids=torch.zeros(len(prompt.embeds), 3),
            guidance=torch.tensor([prompt.guidance_scale]),
            controlnet_block_samples=[sample[None] for sample in samples[:2]],
            controlnet_single_block_samples=[sample[None] for sample in samples[2:]],
            return_dict=False,
        )[0][0]
    return velocity


def test_mixed_rows_with_and_without_residuals_equal_diffusers() -> None:
    rows = [
        tiny_flux.row(OF, Spec(f"{i}", grid=grid, seed=i)) for i, grid in enumerate([(3, 4), (4, 4), (2, 3)])
    ]
    samples = [drawn(row.image_tokens, i) for i, row in enumerate(rows)]
    uses = [BlockInputs(residuals=Given(samples[0])), BlockInputs(), BlockInputs(residuals=Given(samples[2]))]
    none = [torch.zeros_like(sample) for sample in samples[1]]
    packed = output(OF, rows, uses)
    for mine, row, given in zip(packed, rows, (samples[0], none, samples[2]), strict=True):
        torch.testing.assert_close(mine, by_diffusers(OF, row, given), atol=CLOSE, rtol=0)
    plain = output(OF, rows[:1], [BlockInputs()])[0]
    assert (packed[0] - plain).abs().max() > 0.05, "the comparison sees residuals"


@pytest.mark.parametrize(
    ("modes", "whole"),
    [
        ((BlockMode.KV,) * 4, True),
        ((BlockMode.HIDDEN,) * 4, False),
        ((BlockMode.KV, BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN), True),
        ((BlockMode.KV, BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN), False),
    ],
)
def test_the_compute_set_equals_the_forward_in_full(modes: tuple[BlockMode, ...], whole: bool) -> None:
    """Where what lies outside is taken from a forward with the same residuals; its blocks' inputs hold them."""
    of = exact_family()
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
    row = tiny_flux.row(OF, Spec())
    with pytest.raises(ValueError, match="has no region"):
        output(OF, [row], [BlockInputs(residuals=Given(drawn(2), whole=False))])


# A Flux ControlNet over packed rows, beside diffusers' own forward of each row.


CPU = torch.device("cpu")
GRIDS = ((3, 4), (4, 4), (2, 3))


def test_packed_samples_equal_those_of_each_row_alone() -> None:
    model: Any = tiny_flux_control.net()
    texts = [torch.randn(4 + i, JOINT_DIM) for i in range(3)]
    pooled, times = torch.randn(3, POOLED_DIM), torch.tensor([900.0, 500.0, 40.0])
    latents, conditions = ([torch.randn(h * w, LATENT) for h, w in GRIDS] for _ in range(2))
    guidance = torch.tensor([3.5, 1.0, 2.0])
    places = [ids(grid) for grid in GRIDS]
    with torch.inference_mode():
        whole = [
            model(
                hidden_states=latents[i][None],
                controlnet_cond=conditions[i][None],
                encoder_hidden_states=texts[i][None],
                pooled_projections=pooled[i : i + 1],
                timestep=times[i : i + 1] / 1000,
                guidance=guidance[i : i + 1],
                txt_ids=torch.zeros(len(texts[i]), 3),
                img_ids=places[i],
                return_dict=False,
            )
            for i in range(3)
        ]
        vectors = prepare_modulation(model, model.time_text_embed(times, guidance * 1000, pooled))
        rotary = [
            model.pos_embed(torch.cat((torch.zeros(len(text), 3), place)))
            for text, place in zip(texts, places, strict=True)
        ]
        sequences = PackedBatch(
            make_layout([len(text) for text in texts], [len(place) for place in places]),
            (torch.cat([c for c, _ in rotary]), torch.cat([s for _, s in rotary])),
            (None, None, None),
        )
        each = elementwise.choose_elementwise(CPU, torch.float32)
        attend = attention.choose_attention(CPU, torch.float32, each.gather)
        parts = FluxComponents(model, FluxProjections(model), attend, each, LowRankHooks(model))
        modulation = Modulation(model, list(torch.split(vectors, 1)), (0, 0, 0))
        forward = FluxForward(parts, sequences, modulation, (), trace=UNTRACED)
        text = model.context_embedder(torch.cat(texts))
        hint = model.controlnet_x_embedder(torch.cat(conditions))
        packed = [
            torch.split(s, [len(p) for p in places]) for s in forward.samples(text, torch.cat(latents), hint)
        ]
    assert len(packed) == 3
    for i, (doubles, singles) in enumerate(whole):
        for mine, theirs in zip(packed, (*doubles, *singles), strict=True):
            torch.testing.assert_close(mine[i], theirs[0], atol=1e-5 * float(theirs.abs().max()), rtol=0)
            assert theirs.abs().max() > 0.1, "the comparison sees samples"


# Vectors of all steps at once are those that diffusers' norms make step by step, and no one else's.


SPEC = Spec(steps=6, true_cfg_scale=2.0)


def stepwise(of: ModelFamily, step: int) -> list[Tensor]:
    """What every norm's linear layer makes of one step of both sequences, in the order of the forward."""
    row, model = tiny_flux.row(of, SPEC), cast("Any", of.network).transformer
    pooled = torch.stack([cast("Any", prompt).pooled for prompt in row.inputs.prompts])
    time = row.track.times[[step] * 2].to(of.dtype) / 1000 * 1000
    guidance = torch.full((2,), SPEC.guidance_scale).to(of.dtype) * 1000
    conditioning = model.time_text_embed(time, guidance, pooled)
    doubles = [norm for block in model.transformer_blocks for norm in (block.norm1, block.norm1_context)]
    norms = [*doubles, *(block.norm for block in model.single_transformer_blocks), model.norm_out]
    return [norm.linear(norm.silu(conditioning)) for norm in norms]


def picked(of: ModelFamily, step: int) -> list[Tensor]:
    """The same, from what is prepared when the row joins."""
    row, model = tiny_flux.row(of, SPEC), cast("Any", of.network).transformer
    prepared = [cast("Tensor", sequence.prepared) for sequence in place_inputs(row, of).sequences]
    found = Modulation(model, prepared, [step] * 2)
    count = len(model.transformer_blocks)
    doubles = [vectors for block in range(count) for vectors in found.double(block)]
    singles = [found.single(count + block) for block in range(len(model.single_transformer_blocks))]
    shift, scale = found.output()
    return [torch.cat(vectors, dim=1) for vectors in (*doubles, *singles, (scale, shift))]


@pytest.mark.parametrize("step", [0, 5])
@torch.inference_mode()
def test_vectors_of_all_steps_are_those_of_each_step(step: int) -> None:
    exact = stepwise(exact_family(), step)
    reference, found = stepwise(OF, step), picked(OF, step)
    double = picked(exact_family(), step)
    for wanted, single, of_float, of_double in zip(exact, reference, found, double, strict=True):
        # A product of several rows may group its sums otherwise than the product of one.
        torch.testing.assert_close(of_float.double(), wanted, atol=float32_bound(single, wanted), rtol=0)
        torch.testing.assert_close(of_double, wanted, atol=1e-12, rtol=0)


@torch.inference_mode()
def test_what_is_prepared_is_the_sequences_own() -> None:
    row = tiny_flux.row(OF, SPEC)
    first, second = (cast("Tensor", sequence.prepared) for sequence in place_inputs(row, OF).sequences)
    again = cast(
        "Tensor", OF.network.prepare(row.inputs.prompts[0], row.track.times, row.inputs.conditioning, ())
    )
    assert torch.equal(first, again)
    assert (first - second).abs().max() > 1e-3
    assert (first[0] - first[1]).abs().max() > 1e-3
