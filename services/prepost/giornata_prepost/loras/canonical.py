"""Canonical files: safetensors whose tensors lie in the order of the network's blocks.

Two tensors a module, ``<path>.down`` (rank, in) and ``<path>.up`` (out, rank), with a convolution's sides after them;
alpha and rank are folded into the latter, so that the change of the weight is ``up @ down``. Text encoders' paths begin
with the encoder's name. All have one dtype. The library sorts tensors by name, which is not the order of blocks.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

FORM: Final = "giornata-lora-1"
"""Value of the metadata's `form`."""
NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""As safetensors calls them."""
ALIGNED_BYTES: Final = 8


def write_canonical(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write `tensors`, of one dtype, in their order; the same values make the same bytes."""
    header: dict[str, object] = {"__metadata__": {"form": FORM, **metadata}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":"), sort_keys=False).encode()
    text += b" " * (-len(text) % ALIGNED_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
