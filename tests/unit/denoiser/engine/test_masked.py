"""Mask-aware forwards: equal to computing everything where they must be, in every form and mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.attention import DenseKV
from giornata.packed.packing import BlockInputs, CachedTokens, Region, make_region
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import blend, denoise_step
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from giornata_lab.bench.compute.workload import grown
from tests.examples import examples
from tests.present import present

OF = tiny_flux.family()
"""What every test computes with that needs no network of its own."""
BLOCKS = 4
FLOAT32 = 1e-5
DOUBLE = torch.float64
"""What is compared in: rounding in float32 depends on the processor."""


@cache
def exact_family(*, fill: bool = False) -> ModelFamily:
    """In double precision; one for all tests."""
    return tiny_flux.family(fill=fill, dtype=DOUBLE)


class Everything:
    """A recorder that keeps all it is shown."""

    def __init__(self) -> None:
        self.inputs: dict[int, Tensor] = {}
        self.heads: dict[int, tuple[Tensor, Tensor]] = {}

    def hidden(self, block: int, hidden: Tensor) -> None:
        self.inputs[block] = hidden.clone()

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        self.heads[block] = key.clone(), value.clone()

    def part(self, block: int, part: str, kept: Tensor) -> None:
        raise AssertionError("a transformer keeps nothing else")


class Recorded:
    """What `Everything` kept, for the tokens outside a region; with room for the sequence's own or without."""

    keeps = False

    def __init__(self, of: Everything, where: Region, room: int = 0) -> None:
        self.of, self.where, self.room = of, where, room

    def keys_values(self, block: int) -> DenseKV:
        parts = []
        for heads in self.of.heads[block]:
            outside = heads[self.where.outside]
            parts.append(torch.cat((outside.new_full((self.room, *outside.shape[1:]), torch.nan), outside)))
        return DenseKV(parts[0], parts[1], self.room)

    def hidden(self, block: int) -> Tensor:
        return self.of.inputs[block][self.where.outside]

    def part(self, block: int, part: str) -> Tensor:
        raise AssertionError("a transformer takes nothing else")


@dataclass
class GivenResiduals:
    """Satisfies :class:`giornata.packed.packing.Residuals`."""

    samples: Sequence[Tensor | None]
    whole: bool = True

    def sample(self, block: int) -> Tensor | None:
        return self.samples[block]


def drawn(tokens: int, seed: int = 0, *, width: int = 64) -> list[Tensor]:
    """A sample of each block."""
    generator = torch.Generator().manual_seed(seed)
    return [0.5 * torch.randn(tokens, width, generator=generator) for _ in range(BLOCKS)]


def on_the_line(row: Row) -> Row:
    """`row` with the latent that its template's run has at its step."""
    return replace(row, latent=row.track.noised(*picture_and_noise(row), row.step))


def picture_and_noise(row: Row) -> tuple[Tensor, Tensor]:
    return row.inputs.conditioning["image_latents"], row.inputs.conditioning["noise"]


def uses_of(rows: Sequence[Row], reuse: Mapping[int, Sequence[BlockInputs]]) -> list[BlockInputs]:
    """By sequence: the positive ones of all rows, then the negative ones."""
    positive = [reuse.get(index, [BlockInputs()])[0] for index in range(len(rows))]
    return positive + [
        reuse[i][1] if i in reuse else BlockInputs()
        for i, row in enumerate(rows)
        if len(row.inputs.prompts) > 1
    ]


def step(of: ModelFamily, rows: Sequence[Row], uses: Sequence[BlockInputs] = ()) -> tuple[Tensor, ...]:
    return tuple(each.latent for each in denoise_step(of, assemble(of, rows), rows, uses))


def recorded(of: ModelFamily, row: Row) -> tuple[Tensor, list[Everything]]:
    """The row's latent after a full step, and what each of its sequences was in it."""
    recorders = [Everything() for _ in row.inputs.prompts]
    (latent,) = step(of, [row], [BlockInputs(recorder=recorder) for recorder in recorders])
    return latent, recorders


def reusing(
    row: Row, recorders: list[Everything], modes: Sequence[BlockMode], *, room: bool
) -> list[BlockInputs]:
    assert row.region is not None
    lengths = [prompt.joint_tokens + len(row.region.computed) for prompt in row.inputs.prompts]
    return [
        BlockInputs(CachedTokens(tuple(modes), Recorded(recorder, row.region, length if room else 0)))
        for recorder, length in zip(recorders, lengths, strict=True)
    ]


def masked(of: ModelFamily, spec: Spec, tokens: list[int], halo: int = 0) -> Row:
    """A row whose region is `tokens`, as on its template's trajectory."""
    row = on_the_line(tiny_flux.row(of, spec))
    touched = torch.zeros(row.image_tokens, dtype=torch.bool)
    touched[tokens] = True
    return replace(row, region=make_region(grown(touched.view(row.grid), halo)))


PLANS = st.lists(st.sampled_from(BlockMode), min_size=BLOCKS, max_size=BLOCKS)


@pytest.mark.slow
@examples(times=1 / 3)  # each computes whole models
@given(st.data())
def test_rows_that_differ_in_everything_equal_full_computation(data: st.DataObject) -> None:
    """Templates, plans, masks, halos, sizes, guidance, prompt lengths, rows in full: all in one batch."""
    of = exact_family(fill=(fill := data.draw(st.booleans())))
    rows, wanted, reuse = [], [], {}
    for index in range(data.draw(st.integers(1, 4))):
        grid = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4))
        spec = Spec(
            f"job {index}",
            grid=grid,
            text_tokens=data.draw(st.integers(1, 6)),
            true_cfg_scale=data.draw(st.sampled_from([1.0, 3.0])),
            guidance_scale=data.draw(st.sampled_from([1.0, 30.0])),
            steps=data.draw(st.integers(1, 5)),
            seed=index,
        )
        tokens = data.draw(st.sets(st.integers(0, grid[0] * grid[1] - 1), min_size=1))
        row = masked(of, spec, sorted(tokens), halo=data.draw(st.integers(0, 1)))
        whole, recorders = recorded(of, replace(row, region=None))
        if row.region is not None and data.draw(st.booleans()):
            reuse[index] = reusing(row, recorders, data.draw(PLANS), room=data.draw(st.booleans()))
        rows.append(row)
        wanted.append(whole)
    latents = step(of, rows, uses_of(rows, reuse))
    for row, latent, whole in zip(rows, latents, wanted, strict=True):
        inside = slice(None) if row.region is None else row.region.computed
        torch.testing.assert_close(latent[inside], whole[inside], atol=FLOAT32, rtol=0)
        if row.region is not None:
            after = row.track.noised(*picture_and_noise(row), 1)
            kept = after if fill else blend(after, after, row.inputs.conditioning["mask"])
            assert torch.equal(latent[row.region.outside], kept[row.region.outside])


@pytest.mark.parametrize(
    "modes",
    [[*list(BlockMode), BlockMode.KV], [BlockMode.KV, BlockMode.FULL, BlockMode.HIDDEN, BlockMode.FULL]],
)
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_sequence_takes_and_records_at_once(modes: list[BlockMode], scale: float) -> None:
    """A recorder sees the tokens that a block computes; what it sees there is what a forward in full shows."""
    row = masked(OF, Spec(grid=(4, 5), true_cfg_scale=scale), [6, 7, 11])
    assert row.region is not None
    whole, recorders = recorded(OF, replace(row, region=None))
    beside = [Everything() for _ in recorders]
    uses = reusing(row, recorders, modes, room=True)
    both = [replace(use, recorder=each) for use, each in zip(uses, beside, strict=True)]
    (latent,) = step(OF, [row], both)
    torch.testing.assert_close(latent[row.region.computed], whole[row.region.computed], atol=FLOAT32, rtol=0)
    for seen, wanted in zip(beside, recorders, strict=True):
        for block, mode in enumerate(modes):
            tokens = slice(None) if mode is BlockMode.FULL else row.region.computed
            pairs = zip(
                (seen.inputs[block], *seen.heads[block]),
                (wanted.inputs[block], *wanted.heads[block]),
                strict=True,
            )
            for here, there in pairs:
                torch.testing.assert_close(here, there[tokens], atol=FLOAT32, rtol=0)


@pytest.mark.parametrize(
    ("modes", "whole"),
    [
        ((BlockMode.KV,) * 4, True),
        ((BlockMode.HIDDEN,) * 4, False),
        ((BlockMode.KV, BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN), True),
        ((BlockMode.KV, BlockMode.FULL, BlockMode.KV, BlockMode.HIDDEN), False),
    ],
)
def test_what_controlnets_add_joins_the_tokens_that_are_computed(
    modes: tuple[BlockMode, ...], whole: bool
) -> None:
    """What lies outside is taken from a forward with the same residuals; its blocks' inputs hold them."""
    of, recorder = exact_family(), Everything()
    row = masked(of, Spec(grid=(4, 5)), [6, 7, 11])
    computed, samples = (
        present(row.region).computed,
        [sample.to(DOUBLE) for sample in drawn(row.image_tokens)],
    )
    full_use = BlockInputs(recorder=recorder, residuals=GivenResiduals(samples))
    (full,) = step(of, [replace(row, region=None)], [full_use])
    given = GivenResiduals(samples if whole else [sample[computed] for sample in samples], whole)
    (taken,) = reusing(row, [recorder], modes, room=False)
    (mine,) = step(of, [row], [replace(taken, residuals=given)])
    torch.testing.assert_close(mine[computed], full[computed], atol=FLOAT32, rtol=0)


def test_a_residual_of_a_region_needs_one() -> None:
    row = tiny_flux.row(OF, Spec())
    with pytest.raises(ValueError, match="has no region"):
        step(OF, [row], [BlockInputs(residuals=GivenResiduals(drawn(2), whole=False))])
