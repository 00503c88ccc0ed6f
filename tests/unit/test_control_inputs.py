"""What a ControlNet sees, by its configuration."""

from __future__ import annotations

from typing import Any

import pytest
from diffusers import ControlNetModel, FluxControlNetModel, SD3ControlNetModel

from giornata.control.layout import control_input
from giornata.wire.adapters import ControlInput

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


def test_other_extra_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="3 extra channels"):
        control_input({"_class_name": "SD3ControlNetModel", "extra_conditioning_channels": 3})
