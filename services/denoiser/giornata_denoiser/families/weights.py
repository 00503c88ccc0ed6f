"""Networks of diffusers from a checkpoint's folder: with their weights, or their outline alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from giornata.weight_loading import load_network
from giornata_denoiser.choices import WeightQuantization
from giornata_denoiser.families.quantizing import quantize

OUTLINE: Final = torch.device("meta")
"""Where a network has shapes and no weights: for processes that describe a model and compute nothing."""


def loaded(
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
