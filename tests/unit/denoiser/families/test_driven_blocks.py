"""What driven families tell of their blocks and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from giornata.families import Family
from giornata.packed.compute_set import BlockInputs, CachedTokens, make_region, with_companions
from giornata.planning.operations import step_work
from giornata.wire.errors import InvalidField
from giornata.wire.values import BlockMode
from giornata_denoiser.checkpoint import LOADERS
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.tiny_flux import SCHEDULER, Spec
from tests.fakes import tiny_driven
from tests.fakes.tiny_driven import FAMILIES
from tests.present import present
from tests.unit.denoiser.engine.test_masked import Everything, Recorded
from tests.unit.denoiser.families.test_driven import DIFFERENT, EXACT, NAMES, predicted

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
