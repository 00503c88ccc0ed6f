"""Named tensors as safetensors bytes, for blobs. Imports torch, so only services that compute import it."""

from __future__ import annotations

from collections.abc import Mapping

import safetensors.torch
import torch
from safetensors import SafetensorError

from giornata.wire.errors import InputLost


def pack(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """`tensors` on the CPU, contiguous, with their dtypes, as safetensors bytes."""
    return safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    )


def unpack(data: bytes) -> dict[str, torch.Tensor]:
    """The tensors in `data`, on the CPU; InputLost if the bytes are not whole safetensors."""
    try:
        return safetensors.torch.load(data)
    except SafetensorError as error:
        raise InputLost("A blob does not hold tensors.", received=f"{len(data)} bytes") from error
