"""Networks with the weights of a folder: its variant, and weights times the scales beside them. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import nn

from giornata.checkpoints import chosen_weights, variant_of

SCALES: Final = frozenset({"scale_weight", "weight_scale", "scale"})
"""What a layer's weights are multiplied by, as files call it beside `weight`."""
UNREAD: Final = frozenset({"bias", "weight", "scale_input", "input_scale", "comfy_quant"})
"""What else may stand beside weights in float8. Scales of inputs serve products in float8: none is computed."""
FLOAT8: Final = ("F8_E4M3", "F8_E5M2")
LOADED: Final = ("F64", "F32", "F16", "BF16", *FLOAT8)
"""Types of weights that are loaded, as safetensors calls them."""


def load_network(kind: Any, folder: Path, subfolder: str = "", *, dtype: torch.dtype) -> Any:
    """The network of diffusers' class `kind` in `folder`, with weights in `dtype` on the CPU.

    Raises:
        ValueError: it cannot be made of this configuration, or of these weights.
        OSError: weights are missing; safetensors alone are read.
    """
    check_weights(part := folder / subfolder)
    options = {"torch_dtype": dtype, "use_safetensors": True, "local_files_only": True}
    network = kind.from_pretrained(
        str(folder), subfolder=subfolder or None, variant=variant_of(part), **options
    )
    multiply_scales(network, part)
    return network


def check_weights(folder: Path) -> dict[str, tuple[str, str]]:
    """Types and files of a component's tensors, as :func:`_headers`.

    Raises:
        ValueError: its weights are no numbers by themselves, or something unknown stands beside them.
    """
    headers = _headers(folder)
    for name, (kind, _) in headers.items():
        layer, _, part = name.rpartition(".")
        if part == "weight" and kind not in LOADED:
            raise ValueError(f"{folder} holds {name} as {kind}; accepted are weights as {', '.join(LOADED)}")
        if part not in SCALES | UNREAD and headers.get(f"{layer}.weight", ("", ""))[0] in FLOAT8:
            raise ValueError(
                f"{folder} holds {name} beside weights in float8; accepted: {', '.join(sorted(SCALES))}"
            )
    return headers


@torch.no_grad()
def multiply_scales(network: nn.Module, folder: Path) -> None:
    """Multiply the weights of `network` by the scales in its `folder`, which its library leaves out without a word.

    Raises:
        ValueError: as :func:`check_weights`, or a scale does not fit the weights.
    """
    headers, tensors = check_weights(folder), network.state_dict(keep_vars=True)
    for name, (_, path) in headers.items():
        layer, _, part = name.rpartition(".")
        beside, _ = headers.get(f"{layer}.weight", ("", path))
        if part not in SCALES or name in tensors or (part == "scale" and beside not in FLOAT8):
            continue
        with safe_open(path, framework="pt") as file:
            scale = file.get_tensor(name)
        weight = tensors.get(f"{layer}.weight")
        # one for each input channel is as long in a square layer, but lies in its second dimension
        upright = scale.shape[:1].numel() == scale.numel()
        if weight is None or not upright or scale.numel() not in {1, len(weight)}:
            raise ValueError(
                f"{folder} has the scale {name} {tuple(scale.shape)} for weights {getattr(weight, 'shape', None)}; "
                "accepted: one number, or one for each output channel of a layer of this network"
            )
        weight.copy_(weight.float() * scale.float().reshape(-1, *[1] * (weight.ndim - 1)))


def _headers(folder: Path) -> dict[str, tuple[str, str]]:
    """Types, as safetensors calls them, and files of the tensors in a component's folder."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted(chosen_weights(map(str, folder.glob("*.safetensors")))):
        with safe_open(path, framework="pt") as file:
            found |= {name: (file.get_slice(name).get_dtype(), path) for name in file.keys()}  # noqa: SIM118 - no mapping
    return found
