"""One LoRA from its source to its canonical file. Runs in a process of its own: it imports torch and diffusers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from giornata.wire.errors import LoraMismatch, LoraNotFinite, LoraNotSupported, LoraUnreadable
from giornata_prepost.loras.canonical import TEXT_ENCODERS, write_canonical
from giornata_prepost.loras.checkpoint_modules import CheckpointModules
from giornata_prepost.loras.source import LoraFactors, read_source

EIGHT_BITS: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Nothing computes with these; bfloat16 holds all their values."""
FIRST: Final = {"x_embedder", "img_in", "conv_in", "pos_embed.proj", "all_x_embedder.2-1"}
"""Layers that take the latents, by families."""


class CanonicalLoraSummary(NamedTuple):
    """A summary of a canonical file."""

    rank: int
    modules: int
    text_modules: int
    weights: int
    """In the factors of `modules`."""


def normalise(source: Path, target: Path, folder: Path, told: Mapping[str, str]) -> CanonicalLoraSummary:
    """Write the canonical file `target` of the LoRA `source`, for the checkpoint in `folder`.

    `told` is what the file's metadata tell beside rank and text encoders: model, its digest, the source's digest.

    Raises:
        LoraUnreadable: the source is not whole safetensors. Nothing is ever unpickled.
        LoraNotSupported, LoraMismatch: as :func:`read_source`; or a module or its shape is another model's.
        LoraNotFinite: a factor has values that are not finite.
    """
    tensors, metadata = _loaded(source)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise LoraNotFinite(received=name)
    modules = CheckpointModules(folder)
    found = read_source(tensors, metadata, modules)
    order = modules.order()
    network = _checked(found.pop(modules.network_name, {}), modules.network, "")
    parts = dict(sorted(network.items(), key=lambda one: order[one[0]]))
    for name, factors in sorted(found.items()):
        parts |= _checked(factors, modules.parts[name], f"{name}.")
    written = _written(parts)
    rank = max(factors.down.shape[0] for factors in parts.values())
    text_modules = len(parts) - len(network)
    facts = {"rank": str(rank), TEXT_ENCODERS: ",".join(sorted(found)), **told}
    write_canonical(target, written, facts)
    weights = sum(part.numel() for factors in network.values() for part in factors[:2])
    return CanonicalLoraSummary(rank, len(network), text_modules, weights)


def _loaded(source: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    try:
        with safe_open(source, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dictionary
            told = file.metadata() or {}
    except SafetensorError as error:
        raise LoraUnreadable(received=str(error), accepted="a whole file of safetensors") from error
    return {
        name: tensor.bfloat16() if tensor.dtype in EIGHT_BITS else tensor for name, tensor in tensors.items()
    }, told


def _checked(found: Mapping[str, LoraFactors], model: nn.Module, prefix: str) -> dict[str, LoraFactors]:
    """The factors, if the model has such modules of such shapes; their names begin with `prefix`."""
    named = dict(model.named_modules())
    for path, factors in found.items():
        wanted = _shapes(named.get(path), factors.down.shape[0])
        received = tuple(factors.down.shape), tuple(factors.up.shape)
        if wanted is None:
            raise LoraMismatch(
                "The LoRA has a module that the model does not have.",
                received=prefix + path,
                accepted=f"linear layers and convolutions of {type(model).__name__}",
            )
        if path in FIRST and factors.down.shape[1] > wanted[0][1]:
            raise LoraNotSupported(
                "The LoRA widens the network's first layer, as Control LoRAs and those for inpainting models do.",
                received=f"{path}: {factors.down.shape[1]} channels",
                accepted=f"its {wanted[0][1]} channels",
            )
        if received != wanted:
            raise LoraMismatch(
                "The LoRA's factors have other shapes than the model's module; maybe it is for another model.",
                received=f"{prefix}{path}: {received[0]} and {received[1]}",
                accepted=f"{wanted[0]} and {wanted[1]}",
            )
    return {prefix + path: factors for path, factors in found.items()}


def _shapes(module: nn.Module | None, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Shapes of the factors of a module; None if it takes none."""
    if isinstance(module, nn.Linear):
        return (rank, module.in_features), (module.out_features, rank)
    if isinstance(module, nn.Conv2d) and module.groups == 1:
        sides = tuple(module.kernel_size)
        return (rank, module.in_channels, *sides), (module.out_channels, rank, 1, 1)
    return None


def _written(parts: Mapping[str, LoraFactors]) -> dict[str, Tensor]:
    """The tensors of the file, with alpha folded into the second factor.

    They keep the source's dtype, unless it has several or cannot hold a folded factor: then they are float32.
    """
    dtypes = {tensor.dtype for factors in parts.values() for tensor in factors[:2]}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    scaled = {path: _folded(factors) for path, factors in parts.items()}
    if not all(bool(torch.isfinite(up.to(dtype)).all()) for up in scaled.values()):
        dtype = torch.float32
    written: dict[str, Tensor] = {}
    for path, factors in parts.items():
        written[f"{path}.down"] = factors.down.to(dtype)
        written[f"{path}.up"] = scaled.pop(path).to(dtype)
    return written


def _folded(factors: LoraFactors) -> Tensor:
    """`up` times alpha / rank, float32."""
    return factors.up.float() * factors.scale
