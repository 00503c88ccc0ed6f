"""What a ControlNet sees by its configuration, and which of its samples goes behind which block, as in diffusers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from diffusers import ControlNetModel, FluxControlNetModel, SD3ControlNetModel
from hypothesis import given
from hypothesis import strategies as st

from giornata.control.layout import BlockCounts, control_input, flux_layout, sd3_layout, sum_residuals
from giornata.wire.adapters import ControlInput

COUNTS = st.integers(1, 20)


@given(double=COUNTS, single=COUNTS, doubles=COUNTS, singles=COUNTS, repeats=st.booleans())
def test_it_is_the_one_that_diffusers_adds(
    double: int, single: int, doubles: int, singles: int, repeats: bool
) -> None:
    base, samples = BlockCounts(double, single), BlockCounts(min(doubles, double), min(singles, single))
    interval = math.ceil(double / samples.double)
    expected = [block % samples.double if repeats else block // interval for block in range(double)]
    interval = math.ceil(single / samples.single)
    expected += [samples.double + block // interval for block in range(single)]
    assert flux_layout(base, samples, repeats=repeats) == tuple(expected)
    assert all(index < samples.double + samples.single for index in expected)


def test_without_samples_of_a_kind_nothing_is_added_there() -> None:
    base = BlockCounts(2, 3)
    assert flux_layout(base, BlockCounts(1, 0)) == (0, 0, None, None, None)
    assert flux_layout(base, BlockCounts(0, 1)) == (None, None, 0, 0, 0)


@given(blocks=st.integers(1, 40), samples=COUNTS)
def test_of_sd3_it_is_the_one_that_diffusers_adds(blocks: int, samples: int) -> None:
    samples = min(samples, blocks)
    interval = blocks / samples
    last_is_text_free = [int(block / interval) for block in range(blocks - 1)]
    assert sd3_layout(blocks, samples) == (*last_is_text_free, None)


NETS = st.integers(1, 8).flatmap(
    lambda blocks: st.lists(
        st.lists(st.one_of(st.none(), st.integers(0, 3)), min_size=blocks, max_size=blocks).map(tuple),
        min_size=1,
        max_size=3,
    )
)


@given(nets=NETS)
def test_a_sum_holds_what_every_net_adds_behind_its_blocks(nets: list[tuple[int | None, ...]]) -> None:
    found = sum_residuals(nets)
    for block, index in enumerate(found.behind):
        wanted = {(net, behind[block]) for net, behind in enumerate(nets) if behind[block] is not None}
        assert (set() if index is None else set(found.parts[index])) == wanted
    assert len(set(found.parts)) == len(found.parts), "equal sums are computed once"
    assert [found.behind.index(index) for index in range(len(found.parts))] == list(found.first)


FLUX = {
    "num_layers": 1, "num_single_layers": 0, "attention_head_dim": 8, "num_attention_heads": 2,
    "joint_attention_dim": 8, "pooled_projection_dim": 8, "axes_dims_rope": [4, 2, 2], "in_channels": 8,
}  # fmt: skip
SD3 = {
    "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 8,
    "caption_projection_dim": 16, "pooled_projection_dim": 8, "in_channels": 4, "sample_size": 8,
    "pos_embed_max_size": 8,
}  # fmt: skip
UNET = {
    "block_out_channels": (8,), "down_block_types": ("DownBlock2D",), "layers_per_block": 1, "norm_num_groups": 4,
    "cross_attention_dim": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape", "options", "expected"),
    [
        (FluxControlNetModel, FLUX, {}, ControlInput.USUAL),
        (FluxControlNetModel, FLUX, {"conditioning_embedding_channels": 8}, ControlInput.PIXELS),
        (SD3ControlNetModel, SD3, {}, ControlInput.UNSHIFTED),
        (SD3ControlNetModel, SD3, {"force_zeros_for_pooled_projection": False}, ControlInput.USUAL),
        (SD3ControlNetModel, SD3, {"extra_conditioning_channels": 1}, ControlInput.MASKED),
        (ControlNetModel, UNET, {}, ControlInput.USUAL),
    ],
)
def test_the_configuration_of_diffusers_tells(
    kind: Any, shape: dict[str, Any], options: dict[str, Any], expected: ControlInput
) -> None:
    made = kind(**shape, **options)
    assert control_input({"_class_name": kind.__name__, **made.config}) is expected
    if kind is FluxControlNetModel:
        assert (made.input_hint_block is not None) == (expected is ControlInput.PIXELS)


def test_a_file_may_leave_out_defaults() -> None:
    assert control_input({"_class_name": "SD3ControlNetModel"}) is ControlInput.UNSHIFTED
    assert control_input({"_class_name": "FluxControlNetModel"}) is ControlInput.USUAL
