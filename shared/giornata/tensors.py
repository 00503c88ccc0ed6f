"""Named tensors as safetensors bytes, for blobs. Imports torch, so only services that compute import it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError

from giornata.wire.errors import InputLost

EMBEDS: Final = "prompt_embeds"
POOLED: Final = "pooled_prompt_embeds"
SIZES: Final = "add_time_ids"
"""Names of a text encoding's tensors: (text_tokens, channels); of some (channels,), and of SDXL (6,) sizes."""
PROMPT_MASK: Final = "prompt_attention_mask"
"""Name of a text encoding's tensor (text_tokens,): 1 for tokens of the prompt, 0 for those that pad it. Optional."""

NEGATIVE: Final = "negative_"
"""Begins the names of a text encoding's tensors that are of the negative prompt."""


def padding_tokens(mask: torch.Tensor | None) -> int:
    """Return how many of a text's last tokens are padding by its :data:`PROMPT_MASK`; one token at least is none."""
    if mask is None:
        return 0
    live = mask.nonzero()
    last = int(live[-1]) if len(live) else 0
    return len(mask) - 1 - last


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
