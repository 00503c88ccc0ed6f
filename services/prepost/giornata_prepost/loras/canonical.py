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
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from giornata.wire.errors import LoraUnreadable

FORM: Final = "giornata-lora-1"
"""Value of the metadata's `form`."""
NAMES: Final = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""As safetensors calls them."""
ALIGNED_BYTES: Final = 8
DOWN, UP = ".down", ".up"
TEXT_ENCODERS: Final = "text_encoders"
"""Metadata key whose value names the text encoders with modules in the file, separated by commas."""


class TextFactors(NamedTuple):
    """Low-rank factors of one module of a text encoder, alpha and rank folded in."""

    down: torch.Tensor
    """(rank, in)."""
    up: torch.Tensor
    """(out, rank)."""


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


def read_text_part(path: Path) -> dict[str, dict[str, TextFactors]]:
    """Factors by module, by text encoder, of a canonical file: in its dtype, empty where it has none.

    Raises:
        LoraUnreadable: it is no canonical file, or not whole.
    """
    try:
        with safe_open(path, framework="pt") as file:
            told = file.metadata() or {}
            encoders = [name for name in told.get(TEXT_ENCODERS, "").split(",") if name]
            texts = [name for name in file.keys() if name.partition(".")[0] in encoders]  # noqa: SIM118 - it is no dictionary
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in texts}
    except SafetensorError as error:
        raise LoraUnreadable(received=str(error), accepted="a whole file of safetensors") from error
    if told.get("form") != FORM:
        raise LoraUnreadable(received=f"form {told.get('form')}", accepted=f"a file of form {FORM}")
    found: dict[str, dict[str, TextFactors]] = {name: {} for name in encoders}
    for name, tensor in tensors.items():
        encoder, _, path_of = name.removesuffix(DOWN).partition(".")
        if name.endswith(DOWN):
            found[encoder][path_of] = TextFactors(tensor, tensors[name.removesuffix(DOWN) + UP])
    return found


def write_text_part(path: Path, target: Path) -> int:
    """Write the text part of a canonical file as a canonical file of its own; the number of its modules.

    Raises:
        LoraUnreadable: as :func:`read_text_part`.
    """
    found = read_text_part(path)
    named = {
        f"{encoder}.{module}.{side}": factor
        for encoder, modules in found.items()
        for module, factors in modules.items()
        for side, factor in factors._asdict().items()
    }
    write_canonical(target, named, {TEXT_ENCODERS: ",".join(found)})
    return len(named) // 2
