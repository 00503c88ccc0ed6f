"""Networks of diffusers from a checkpoint's folder, with their weights in full or in fewer bits."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from giornata.weight_loading import load_network
from giornata.wire.errors import Failed
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families.network import ModelFamily, Network
from giornata_denoiser.families.sampling import FlowMatching, flow_scheduler_config

# Weights alone are quantised, by torchao, each output channel with a scale of its own; products are computed in the
# network's dtype. So a row's arithmetic does not depend on the rows beside it, as with activations that share a scale.


VARIABLE: Final = "GIORNATA_QUANTIZE"
BLOCKS: Final = re.compile(r"\w*(blocks|layers)\.\d")
"""Begins the path of a module in a list of blocks: `transformer_blocks.3.attn.to_q`."""
LEAST: Final = 1024
"""Channels on both sides of a layer from which on it is worth a scale for each output channel."""


def quantized_layers(network: nn.Module, least: int = LEAST) -> tuple[str, ...]:
    """Paths of the linear layers that are quantised: those of blocks that every token passes.

    Layers outside of blocks (embedders, the last projection) are small, and carry what enters and leaves. Modulation is
    computed once a row, not once a token, and scales whole streams. A layer with fewer than `least` channels on a side
    stays, too.
    """
    return tuple(
        path
        for path, module in network.named_modules()
        if isinstance(module, nn.Linear)
        and BLOCKS.match(path)
        and not any(part in path for part in ("norm", "mod", "adaLN"))
        and min(module.in_features, module.out_features) >= least
    )


def check(how: WeightQuantization, device: torch.device) -> None:
    """Have a denoiser refused that cannot quantise.

    Raises:
        Failed: `device` is no GPU, or torchao is not installed.
    """
    if how is WeightQuantization.OFF:
        return
    if device.type != "cuda":
        raise Failed(
            f"{VARIABLE}={how} needs a CUDA device: on a CPU every step would convert the weights back.",
            received=str(device),
            accepted=f"{WeightQuantization.OFF}, or a CUDA device",
        )
    if find_spec("torchao") is None:
        raise Failed(
            f"{VARIABLE}={how} needs torchao, the denoiser's extra `quantize`: in a checkout run `pip install "
            "--constraint constraints.txt torchao`, and build images with the argument EXTRAS=[quantize].",
            received="no torchao",
            accepted=f"{WeightQuantization.OFF}, or an environment with torchao",
        )


def quantize(network: nn.Module, how: WeightQuantization, device: torch.device, least: int = LEAST) -> None:
    """Quantise the :func:`quantized_layers` of `network`, in place, and have them on `device`."""
    if how is WeightQuantization.OFF:
        return
    torchao: Any = import_module("torchao.quantization")
    paths = frozenset(quantized_layers(network, least))
    config = {
        WeightQuantization.INT8: "Int8WeightOnlyConfig",
        WeightQuantization.FLOAT8: "Float8WeightOnlyConfig",
    }
    made = getattr(torchao, config[how])()
    torchao.quantize_(network, made, filter_fn=lambda _, path: path in paths, device=device)


# Networks of diffusers from a checkpoint's folder: with their weights, or their outline alone.


OUTLINE: Final = torch.device("meta")
"""Where a network has shapes and no weights: for processes that describe a model and compute nothing."""


def open_network(
    kind: Any,
    folder: Path,
    subfolder: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> Any:
    """The network of the class `kind` in a diffusers folder, for inference on `device`, its blocks `quantized` there.

    On :data:`OUTLINE` no file but its configuration is read.

    Raises:
        ValueError: it cannot be made of this configuration, or of these weights.
        OSError: weights are missing.
    """
    if device == OUTLINE:
        with device:
            network = kind.from_config(
                kind.load_config(folder, subfolder=subfolder, local_files_only=True)
            ).to(dtype)
    else:
        network = load_network(kind, folder, subfolder, dtype=dtype)
        network.eval().requires_grad_(requires_grad=False)
        quantize(network, quantized, device)  # layer by layer: the device never has all weights in full
        network = network.to(device)
    return network.eval().requires_grad_(requires_grad=False)


def load_flow(
    network: type[Network],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    quantized: WeightQuantization = WeightQuantization.OFF,
) -> ModelFamily:
    """The family of a checkpoint of flow matching.

    Raises:
        ValueError: a scheduler, or a variant of the network, that is not served.
        OSError: weights are missing.
    """
    made = network(
        open_network(network.kind, folder, "transformer", dtype=dtype, device=device, quantized=quantized)
    )
    schedule = FlowMatching(flow_scheduler_config(folder), network.spacing, network.samplers)
    return ModelFamily(made.text, schedule, made)
