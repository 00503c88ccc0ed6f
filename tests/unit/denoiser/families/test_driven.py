"""Driven transformers: packed rows equal the module's own forward, and reuse equals computing everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.families import Family
from giornata.packed.packing import BlockInputs, CachedTokens, Region, make_region, with_companions
from giornata.planning.operations import step_work
from giornata.wire.errors import InvalidField
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import LOADERS
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.tiny_flux import SCHEDULER, Spec
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


# What driven families tell of their blocks and checkpoints.


TEXT = 32
HEIGHTS = (4, 8)
"""Heights of pictures 8 tokens wide, which Z-Image does not pad."""


def row(of: ModelFamily, height: int) -> Row:
    return tiny_driven.row(of, Spec(grid=(height, 8), text_tokens=TEXT))


def multiplications(of: ModelFamily, one: Row, use: BlockInputs) -> float:
    """What a step of a row multiplies, its text and modulation being prepared."""
    assembly = assemble(of, [one])
    # The counter does not know the processor's fused attention.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        of.network.predict(assembly.batch, one.latent, assembly.conditioning, [0], uses=[use])
    flops: int = counter.get_total_flops()
    return flops / 2


def outer(of: ModelFamily) -> tuple[int, int]:
    """Multiplications of a token before the first block, and behind the last one."""
    model: Any = of.network.transformer  # type: ignore[attr-defined]  # of a driven network
    name = next(
        name for name in ("x_embedder", "img_in", "pos_embed", "all_x_embedder") if hasattr(model, name)
    )
    before = sum(w.numel() for n, w in getattr(model, name).named_parameters() if n.endswith("weight"))
    last = model.all_final_layer["2-1"].linear if hasattr(model, "all_final_layer") else model.proj_out
    return before, last.weight.numel()


@pytest.mark.parametrize("name", DIFFERENT)
def test_specs_count_what_cells_texts_and_pairs_multiply(name: str) -> None:
    """Differences of pictures and of prompts, counted operation by operation."""
    of = tiny_driven.family(name)
    before, behind = outer(of)
    blocks = (BlockMode.FULL,) * of.depth

    def inside(height: int, text: int) -> tuple[float, float]:
        """Multiplications of the blocks, but for a constant: counted, and as the specs say."""
        one = tiny_driven.row(of, Spec(grid=(height, 8), text_tokens=text))
        own = before * one.block_tokens + behind * one.image_tokens
        work = step_work(of.operations, one.shapes, [blocks])
        return multiplications(of, one, BlockInputs()) - own, work.linear + work.attention

    (small, wanted_small), *others = (inside(*size) for size in ((4, TEXT), (8, TEXT), (4, 2 * TEXT)))
    for counted, wanted in others:
        assert counted - small == pytest.approx(wanted - wanted_small, rel=1e-12)


@pytest.mark.parametrize("name", DIFFERENT)
def test_specs_count_what_a_projected_cell_multiplies(name: str) -> None:
    of = tiny_driven.family(name)
    whole = row(of, HEIGHTS[0])
    seen = Everything()
    predicted(of, [whole], [BlockInputs(recorder=seen)])
    touched = torch.zeros(whole.grid, dtype=torch.bool)
    touched[1, 2:5] = True
    found = present(make_region(touched))
    one = replace(whole, region=with_companions(found, whole.inputs.companions))
    assert one.region is not None
    source, depth = Recorded(seen, one.region), of.depth
    kv, hidden = ((BlockMode.KV, *(mode,) * (depth - 1)) for mode in (BlockMode.KV, BlockMode.HIDDEN))
    difference = multiplications(of, one, BlockInputs(CachedTokens(hidden, source))) - multiplications(
        of, one, BlockInputs(CachedTokens(kv, source))
    )
    assert difference == sum(spec.outside for spec in of.specs[1:]) * len(one.region.outside)


@pytest.mark.parametrize("name", DIFFERENT)
def test_specs_name_the_channels_that_recorders_see(name: str) -> None:
    of = tiny_driven.family(name)
    seen = Everything()
    predicted(of, [row(of, HEIGHTS[0])], [BlockInputs(recorder=seen)])
    for block, spec in enumerate(of.specs):
        key, value = seen.heads[block]
        assert key.shape[1:] == value.shape[1:] == (spec.heads, spec.parts["key"] // spec.heads)
        assert (value.flatten(1).shape[1], seen.inputs[block].shape[1]) == (
            spec.parts["value"],
            spec.parts["hidden"],
        )


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_is_loaded_from_its_folder(name: str, tmp_path: Path) -> None:
    tiny_driven.unhooked(name).save_pretrained(tmp_path / "transformer")
    FlowMatchEulerDiscreteScheduler.from_config(SCHEDULER).save_pretrained(tmp_path / "scheduler")
    loaded = LOADERS[Family(name)](tmp_path, torch.float64, torch.device("cpu"), WeightQuantization.OFF)
    of = tiny_driven.family(name)
    one = row(of, HEIGHTS[0])
    # frequencies of timesteps are loaded in float32
    torch.testing.assert_close(predicted(loaded, [one])[0], predicted(of, [one])[0], atol=EXACT, rtol=0)
    assert loaded.network.prepared_bytes == of.network.prepared_bytes


@pytest.mark.parametrize("name", NAMES)
def test_what_is_prepared_takes_what_was_announced(name: str) -> None:
    of = tiny_driven.family(name)
    one = row(of, HEIGHTS[0])
    prepared: Any = of.network.prepare(
        one.inputs.prompts[0], one.track.times, one.inputs.conditioning, one.inputs.beside
    )
    assert prepared.vectors.nbytes == one.steps * of.network.prepared_bytes
    assert len(prepared.text) == one.inputs.prompts[0].joint_tokens


@pytest.mark.parametrize("name", ["sd3", "z-image"])
def test_a_picture_without_positions_is_refused(name: str) -> None:
    of = tiny_driven.family(name)
    with pytest.raises(InvalidField, match="larger than the model has positions for") as caught:
        tiny_driven.row(of, Spec(grid=(2, 17)))
    assert (caught.value.field, caught.value.received) == ("size", "17x2 tokens")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("sd3", {"in_channels": 33}, "holds more than the latent"),
        ("qwen-image", {"use_additional_t_cond": True}, "use_additional_t_cond is not served"),
        ("qwen-image", {"use_layer3d_rope": True}, "use_layer3d_rope is not served"),
        ("flux2-klein", {"guidance_embeds": True}, "guidance scale is not served"),
    ],
)
def test_a_variant_that_is_not_served_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    model = tiny_driven.unhooked(name)
    other = type(model).from_config({**model.config, **change, "_use_default_values": []})
    with pytest.raises(ValueError, match=message):
        FAMILIES[name].network(other)
