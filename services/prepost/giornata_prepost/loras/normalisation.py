"""One LoRA from its source to its canonical file. Runs in a process of its own: it imports torch and diffusers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import diffusers
import torch
import transformers
from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
from diffusers.utils.state_dict_utils import StateDictType
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from giornata.families import KINDS
from giornata.lora_files import read_factor_name
from giornata.wire.errors import LoraMismatch, LoraNotFinite, LoraNotSupported, LoraUnreadable
from giornata_prepost.loras.canonical import TEXT_ENCODERS, write_canonical
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


LAYERS = nn.Linear, nn.Conv2d
BELOW = "text_model."
MIDDLE = "mid_block"
UP = "up_blocks"


@dataclass(frozen=True)
class CheckpointModules:
    """The modules of a checkpoint that LoRAs change, without its weights: they are built on the meta device."""

    folder: Path

    @cached_property
    def pipeline(self) -> Any:
        """diffusers' pipeline of the checkpoint, which reads LoRAs; LoraNotSupported where it reads none."""
        found = getattr(diffusers, self.index["_class_name"])
        if not hasattr(found, "lora_state_dict"):
            raise LoraNotSupported("Models of this kind take no LoRA.", received=self.index["_class_name"])
        return found

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``model_index.json``."""
        found: dict[str, Any] = json.loads((self.folder / "model_index.json").read_text(encoding="utf-8"))
        return found

    @property
    def network_name(self) -> str:
        """`transformer` or `unet`."""
        return KINDS[self.index["_class_name"]].network

    @cached_property
    def network(self) -> Any:
        """The denoising network on the meta device, with its configuration."""
        kind = getattr(diffusers, self.index[self.network_name][1])
        with torch.device("meta"):
            return kind.from_config(kind.load_config(self.folder / self.network_name))

    @property
    def text_encoders(self) -> list[str]:
        """Names of the text encoders for which the pipeline reads LoRAs, and which the checkpoint has."""
        names = [name for name in self.pipeline._lora_loadable_modules if name.startswith("text_encoder")]  # noqa: SLF001 - it has no public name
        return [name for name in names if (self.index.get(name) or [None])[0] is not None]

    @cached_property
    def parts(self) -> dict[str, nn.Module]:
        """The network and the text encoders, by name, on the meta device."""
        parts: dict[str, nn.Module] = {self.network_name: self.network}
        for name in self.text_encoders:
            kind = getattr(transformers, self.index[name][1])
            with torch.device("meta"):
                parts[name] = kind(kind.config_class.from_pretrained(self.folder / name))
        return parts

    def find(self, name: str) -> tuple[str, str, bool] | None:
        """Part, module and side of a factor by its name, whoever spelled it; None where no module has that name."""
        part, rest = self.split(name)
        (renamed,) = (
            convert_unet_state_dict_to_peft({rest: None})
            if part == self.network_name
            else convert_state_dict_to_peft({rest: None}, original_type=StateDictType.DIFFUSERS_OLD)
        )
        found = read_factor_name(renamed)
        path = found and self._paths[part].get(found.module.replace(".", "_"))
        return (part, path, found.is_down) if found and path else None

    def find_module(self, name: str) -> tuple[str, str] | None:
        """Part and path of a module by its name; None where there is none."""
        part, rest = self.split(name)
        path = self._paths[part].get(rest.replace(".", "_"))
        return (part, path) if path else None

    def split(self, name: str) -> tuple[str, str]:
        """The part that a name begins with, and the rest; without one, the network."""
        return next(
            (part, name[found.end() :]) for part, begin in self._begins if (found := begin.match(name))
        )

    @cached_property
    def _begins(self) -> list[tuple[str, re.Pattern[str]]]:
        """Return how names of each part begin, in diffusers, trainers and ComfyUI; PEFT's begin with the module."""
        begins = []
        for name in self.text_encoders:
            number, clip = ("2", "g") if name.endswith("_2") else ("1?", "l")
            begins.append((name, rf"{name}\.|lora_te{number}_|text_encoders\.clip_{clip}\.transformer\."))
        dotted = rf"(?:(?:base_model\.model|diffusion_model|{self.network_name})\.)*"
        begins.append((self.network_name, rf"lora_(?:unet|transformer)_|lycoris_|{dotted}"))
        return [(part, re.compile(begin)) for part, begin in begins]

    @cached_property
    def _paths(self) -> dict[str, dict[str, str]]:
        """Paths of each part's modules, by their spelling with underscores.

        Files have text encoders' modules below `text_model` or not, whatever the encoder has.
        """
        paths: dict[str, dict[str, str]] = {}
        for part, module in self.parts.items():
            layers = [path for path, layer in module.named_modules() if isinstance(layer, LAYERS)]
            paths[part] = {path.replace(".", "_"): path for path in layers}
            if part != self.network_name:
                bare = {path.removeprefix(BELOW): path for path in layers}
                paths[part] |= {
                    begin + each.replace(".", "_"): path
                    for each, path in bare.items()
                    for begin in ("", "text_model_")
                }
        return paths

    def order(self) -> dict[str, int]:
        """Place of each of the network's modules in the order in which a forward meets their blocks.

        Modules are defined in that order, except that UNets define their middle block last.
        """
        names = [name for name, _ in self.network.named_modules()]
        late = [name for name in names if name.partition(".")[0] == UP] if MIDDLE in names else []
        first_up = names.index(late[0]) if late else len(names)
        middle = [name for name in names[first_up:] if name.partition(".")[0] == MIDDLE]
        rest = [name for name in names[first_up:] if name not in set(middle)]
        return {name: place for place, name in enumerate((*names[:first_up], *middle, *rest))}


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
    scaled = {path: factors.up.float() * factors.scale for path, factors in parts.items()}
    if not all(bool(torch.isfinite(up.to(dtype)).all()) for up in scaled.values()):
        dtype = torch.float32
    written: dict[str, Tensor] = {}
    for path, factors in parts.items():
        written[f"{path}.down"] = factors.down.to(dtype)
        written[f"{path}.up"] = scaled.pop(path).to(dtype)
    return written
