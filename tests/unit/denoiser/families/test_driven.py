"""Driven transformers: packed rows equal the module's own forward, and reuse equals computing everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from giornata.packed.compute_set import BlockInputs, CachedTokens, Region, make_region, with_companions
from giornata.wire.values import BlockMode
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.examples import examples
from tests.fakes import tiny_driven
from tests.fakes.tiny_driven import FAMILIES
from tests.present import present
from tests.unit.denoiser.engine.test_masked import Everything, Recorded

EXACT = 3e-6
"""Diffusers turns positions and times in float32."""
NAMES = sorted(FAMILIES)
DIFFERENT = sorted(FAMILIES.keys() - {"flux2", "flux2-klein", "qwen-image"})
"""Networks with different hooks: the others have those of Klein-KV, and of Qwen-Image-Edit."""
SPECS = (
    Spec("small", grid=(3, 5), text_tokens=5, steps=4, seed=1),
    Spec("large", grid=(6, 4), text_tokens=9, steps=7, seed=2),
    Spec("later", grid=(4, 4), text_tokens=33, steps=3, seed=3),
)


def rows_of(of: ModelFamily) -> list[Row]:
    """Rows that differ in size, prompt, noise level."""
    return [replace(tiny_driven.row(of, spec), step=index) for index, spec in enumerate(SPECS)]


def predicted(of: ModelFamily, rows: Sequence[Row], uses: Sequence[BlockInputs] = ()) -> list[Tensor]:
    assembly = assemble(of, rows)
    latents, steps = torch.cat([row.latent for row in rows]), [row.step for row in rows]
    with torch.no_grad():
        out = of.network.predict(assembly.batch, latents, assembly.conditioning, steps, uses=uses)
    return list(torch.split(out, assembly.computed_lengths))


def region_of(row: Row, computed: Sequence[int]) -> Region:
    """The region of these tokens; the picture's companions lie outside."""
    touched = torch.zeros(row.grid, dtype=torch.bool)
    touched.view(-1)[list(computed)] = True
    found = present(make_region(touched))
    return with_companions(found, row.inputs.companions)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_equal_the_modules_own_forward_of_each(name: str) -> None:
    """Rows of one length are the items of a batch; they differ in prompt and noise level all the same.

    Edits of Qwen-Image have references; that of 2511 sees them at timestep 0.
    """
    of = tiny_driven.family(name)
    specs = (replace(SPECS[0], steps=spec.steps, seed=spec.seed) for spec in SPECS)
    alike = [replace(tiny_driven.row(of, spec), step=index) for index, spec in enumerate(specs)]
    unlike = (referring_rows if name.startswith("qwen-image-edit") else rows_of)(of)
    for rows in (unlike, alike):
        for row, out in zip(rows, predicted(of, rows), strict=True):
            torch.testing.assert_close(out, tiny_driven.alone(name, row), atol=EXACT, rtol=0)


REFERENCES = ((), ((2, 3),), ((4, 1), (3, 3), (2, 5)))
"""Sizes of three rows' references."""


def referring_rows(of: ModelFamily) -> list[Row]:
    """:func:`rows_of` with none, one and three references of several sizes."""
    each = zip(SPECS, REFERENCES, strict=True)
    return [replace(tiny_driven.row(of, spec, grids), step=index) for index, (spec, grids) in enumerate(each)]


COMPUTED = ((1, 2, 7), (0, 5, 10, 11, 23), (15,))
"""Cells that each of `SPECS` computes."""


def recorded(of: ModelFamily, rows: Sequence[Row]) -> list[Everything]:
    """What each row's step in full shows."""
    seen = [Everything() for _ in rows]
    predicted(of, rows, [BlockInputs(recorder=one) for one in seen])
    return seen


def masked(rows: Sequence[Row]) -> list[Row]:
    return [replace(row, region=region_of(row, cells)) for row, cells in zip(rows, COMPUTED, strict=True)]


def taking(row: Row, seen: Everything, modes: Sequence[BlockMode], *, room: bool = True) -> BlockInputs:
    """The row's use of what `seen` kept."""
    (own,) = row.own_tokens
    return BlockInputs(CachedTokens(tuple(modes), Recorded(seen, present(row.region), own if room else 0)))


def prefix(full: int, depth: int) -> list[BlockMode]:
    """So many blocks in full, then keys and values."""
    return [BlockMode.FULL] * full + [BlockMode.KV] * (depth - full)


PLANS = (
    [BlockMode.KV] * 4,
    [BlockMode.HIDDEN] * 4,
    [BlockMode.FULL, BlockMode.FULL, BlockMode.HIDDEN, BlockMode.KV],
)
"""Modes of four blocks."""


@pytest.mark.slow
@examples(times=1 / 3)  # each computes whole models
@given(st.data())
def test_rows_that_differ_in_everything_equal_full_computation(data: st.DataObject) -> None:
    """Sizes, prompts, references, noise levels, regions and plans, rows in full among them: all in one batch."""
    of = tiny_driven.family(data.draw(st.sampled_from(NAMES)))
    rows, wanted, uses = list[Row](), list[Tensor](), list[BlockInputs]()
    for index in range(data.draw(st.integers(1, 3))):
        grid = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 5))
        steps = data.draw(st.integers(1, 5))
        spec = Spec(grid=grid, text_tokens=data.draw(st.integers(1, 40)), steps=steps, seed=index)
        beside = data.draw(st.sampled_from(REFERENCES)) if of.network.references.own else ()
        row = replace(tiny_driven.row(of, spec, beside), step=data.draw(st.integers(0, steps - 1)))
        (whole,), (seen,) = predicted(of, [row]), recorded(of, [row])
        cells = data.draw(st.sets(st.integers(0, row.image_tokens - 1), max_size=row.image_tokens - 1))
        use = BlockInputs()
        if cells:
            row = replace(row, region=region_of(row, sorted(cells)))
            whole = whole[sorted(cells)]
            if data.draw(st.booleans()):
                plan = data.draw(st.lists(st.sampled_from(BlockMode), min_size=of.depth, max_size=of.depth))
                use = taking(row, seen, plan, room=data.draw(st.booleans()))
        rows, wanted, uses = [*rows, row], [*wanted, whole], [*uses, use]
    for out, whole in zip(predicted(of, rows, uses), wanted, strict=True):
        torch.testing.assert_close(out, whole, atol=EXACT, rtol=0)


def test_a_driven_block_runs_within_a_forward_alone() -> None:
    network: Any = tiny_driven.family("sd3").network
    hidden = torch.zeros(2, 1, 32, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="runs within a forward alone"):
        network.pair(network.pairs[0], hidden, hidden)


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_masked_step_records_what_a_step_in_full_shows(name: str) -> None:
    of = tiny_driven.family(name)
    row = rows_of(of)[0]
    (seen,) = recorded(of, [row])
    row = replace(row, region=region_of(row, COMPUTED[0]))
    beside = Everything()
    predicted(of, [row], [replace(taking(row, seen, prefix(1, of.depth)), recorder=beside)])
    assert beside.heads.keys() == beside.inputs.keys() == seen.heads.keys() == set(range(of.depth))
    for block, heads in beside.heads.items():
        for here, there in zip(
            (beside.inputs[block], *heads), (seen.inputs[block], *seen.heads[block]), strict=True
        ):
            tokens = slice(None) if block < 1 else list(COMPUTED[0])
            torch.testing.assert_close(here, there[tokens], atol=EXACT, rtol=0)


@pytest.mark.parametrize("name", ["chroma", "flux2-klein-kv", "qwen-image-2.1", "sd3", "z-image"])
def test_half_precision_is_rounded_where_diffusers_rounds_it(name: str) -> None:
    driven, own = (torch.nn.Module.to(tiny_driven.transformer(name), torch.bfloat16) for _ in range(2))
    network = FAMILIES[name].network(driven)
    of = ModelFamily(network.text, tiny_driven.family(name).schedule, network)
    rows = rows_of(of)
    seen, some = recorded(of, rows), masked(rows)
    uses = [taking(row, one, plan) for row, one, plan in zip(some, seen, PLANS, strict=True)]
    for row, out in zip(some, predicted(of, some, uses), strict=True):
        assert out.dtype is torch.bfloat16
        with torch.no_grad():
            near = FAMILIES[name].alone(own, row)[present(row.region).computed]
        assert (out - near).abs().mean() < 0.05 * near.abs().mean()
