"""A LoRA's source as factors by module: diffusers' own converters read the names, PEFT's rules the alphas."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
from diffusers.utils.state_dict_utils import StateDictType
from torch import Tensor, nn

from giornata.wire.errors import GiornataError, LoraMismatch, LoraNotSupported
from giornata_prepost.loras.adapter_config import AdapterConfig, read_configs
from giornata_prepost.loras.checkpoint_modules import CheckpointModules
from giornata_prepost.loras.provenance import traced, untraced, unused

BASE_NAMES: Final = ("modelspec.architecture", "ss_base_model_version", "base_model")
"""Where trainers write for which model they trained."""
PEFT_PREFIX: Final = "base_model.model."
_FACTOR: Final = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight\Z")
_FAILURES: Final = (
    ValueError,
    KeyError,
    IndexError,
    AssertionError,
    NotImplementedError,
    RuntimeError,
    AttributeError,
)
"""What diffusers' converters raise where a file is not as they expect."""


Naming: TypeAlias = Callable[[dict[str, str]], dict[str, str]]
"""Converts the keys of a dictionary, whatever its values."""


class Factors(NamedTuple):
    """One module's."""

    down: Tensor
    """(rank, in), or (rank, in, height, width) of a convolution."""
    up: Tensor
    """(out, rank), or (out, rank, 1, 1)."""
    alpha: float
    """The product counts alpha / rank times."""


@dataclass(frozen=True)
class Source:
    """Factors by module, of the network and of each text encoder."""

    network: Mapping[str, Factors]
    text_encoders: Mapping[str, Mapping[str, Factors]]


def read_source(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], modules: CheckpointModules
) -> Source:
    """The factors in a file of any known style.

    Raises:
        LoraNotSupported: diffusers reads a part of it only, alphas are told of some modules only, or PEFT's
            configuration in its metadata is none.
        LoraMismatch: its names are those of another model.
    """
    named, alphas = _converted(tensors, metadata, modules)
    configs = read_configs(metadata, (modules.network_name, *modules.text_encoders))
    parts = {name: _of_part(named, name) for name in configs}
    taken = {f"{part}.{name}" for part, found in parts.items() for name in found}
    if left := named.keys() - taken:
        raise _other_model(min(left), metadata, modules)
    network = _factors(
        _renamed(parts.pop(modules.network_name), _network_names),
        _of_part(alphas, modules.network_name),
        configs[modules.network_name],
    )
    texts = {
        name: _factors(
            _renamed(found, _text_names(modules.text_encoder(name))),
            _of_part(alphas, name),
            configs[name],
        )
        for name, found in parts.items()
        if found
    }
    return Source(network, texts)


def _with_prefix(tensors: Mapping[str, Tensor], modules: CheckpointModules) -> dict[str, Tensor]:
    """The tensors, with the network's name before modules that PEFT names without it."""
    children = {name for name, _ in modules.network.named_children()}
    named = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in tensors.items()}
    if all(name.partition(".")[0] in children for name in named):
        return {f"{modules.network_name}.{name}": tensor for name, tensor in named.items()}
    return dict(tensors)


def _converted(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], modules: CheckpointModules
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors with diffusers' names, and alphas that are not in them yet.

    Some converters leave tensors out in silence. So the use of each is traced, and one without use is refused.
    """
    sources = traced(tensors)
    read = modules.pipeline.lora_state_dict
    accepted = inspect.signature(read).parameters
    options: dict[str, Any] = {"return_alphas": True} if "return_alphas" in accepted else {}
    if modules.network_name == "unet":
        options["unet_config"] = modules.network.config
    try:
        found = read(_with_prefix(sources, modules), **options)
    except _FAILURES as error:
        reason = str(error) or type(error).__name__
        told = _base_of(metadata)
        raise LoraMismatch(
            f"diffusers cannot read this LoRA for the model: {reason}",
            received=told or next(iter(sorted(tensors)), "no tensors"),
            accepted=f"a LoRA for {modules.index['_class_name']}",
        ) from error
    named, alphas = found if isinstance(found, tuple) else (found, None)
    numbers = {name: float(alpha) for name, alpha in (alphas or {}).items()}
    if left := unused(sources, named.values()):
        raise LoraNotSupported(
            "diffusers reads this LoRA without some of its tensors.",
            received=f"{left[0]}, one of {len(left)}",
            accepted="files of which every tensor counts",
        )
    return {name: untraced(tensor) for name, tensor in named.items()}, numbers


def _of_part(named: Mapping[str, Any], part: str) -> dict[str, Any]:
    prefix = f"{part}."
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}


def _renamed(tensors: dict[str, Tensor], names: Naming) -> dict[str, tuple[str, Tensor]]:
    """By its name in PEFT's style: the name before, and the tensor. Converters look at names alone."""
    if not tensors:
        return {}
    return {new: (old, tensors[old]) for new, old in names({name: name for name in tensors}).items()}


def _network_names(names: dict[str, str]) -> dict[str, str]:
    if all("lora_A" in name or "lora_B" in name for name in names):
        return names
    converted: dict[str, str] = convert_unet_state_dict_to_peft(names)
    return converted


def _text_names(encoder: nn.Module) -> Naming:
    """As diffusers' loader of text encoders: the encoder tells whether modules lie below `text_model`.

    diffusers guesses the style by output projections, which a file may lack; the oldest style's names hold all others.
    """

    def convert(names: dict[str, str]) -> dict[str, str]:
        converted = convert_state_dict_to_peft(names, original_type=StateDictType.DIFFUSERS_OLD)
        if hasattr(encoder, "text_model"):
            return dict(converted)
        return {name.removeprefix("text_model."): old for name, old in converted.items()}

    return convert


def _factors(
    tensors: Mapping[str, tuple[str, Tensor]], alphas: Mapping[str, float], config: AdapterConfig
) -> dict[str, Factors]:
    """Pairs of factors by module, with their alphas."""
    sides: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, told in tensors.items():
        found = _FACTOR.match(name)
        if found is None:
            raise LoraNotSupported("A tensor is no factor of a LoRA.", received=name)
        sides.setdefault(found["module"], {})[found["side"]] = told
    own = _told_alphas({module: pair["A"][0] for module, pair in sides.items() if "A" in pair}, alphas)
    made = {}
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise LoraNotSupported("A module has one factor and not two.", received=module)
        down, up = pair["A"][1], pair["B"][1]
        alpha = own[module] if own else config.alpha(module, down.shape[0])
        made[module] = Factors(down, up, alpha)
    return made


def _told_alphas(firsts: Mapping[str, str], alphas: Mapping[str, float]) -> dict[str, float]:
    """Alphas by module, where the file has any; `firsts` are the converters' names of the modules' first factors.

    diffusers gives modules without an alpha the one that most others have; kohya's trainer takes their rank. So a file
    with alphas for some modules only is refused.
    """
    names = {module: _alpha_name(module, first, alphas) for module, first in firsts.items()}
    if stray := alphas.keys() - set(names.values()):
        raise LoraNotSupported("An alpha belongs to no module with factors.", received=min(stray))
    missing = [module for module, name in names.items() if name is None]
    if alphas and missing:
        raise LoraNotSupported(
            "Some modules have an alpha and others have none.",
            received=f"{missing[0]} without one",
            accepted="an alpha for every module, or for none",
        )
    return {module: alphas[name] for module, name in names.items() if name is not None}


def _alpha_name(module: str, first: str, alphas: Mapping[str, float]) -> str | None:
    """Converters call a module's alpha by the module's name or by that of its first factor."""
    before = (first, first.split(".lora.", maxsplit=1)[0], first.split(".lora_A.", maxsplit=1)[0], module)
    return next((f"{name}.alpha" for name in before if f"{name}.alpha" in alphas), None)


def _base_of(metadata: Mapping[str, str]) -> str | None:
    """The model that the file says it was trained for."""
    return next((metadata[name] for name in BASE_NAMES if metadata.get(name)), None)


def _other_model(name: str, metadata: Mapping[str, str], modules: CheckpointModules) -> GiornataError:
    told = _base_of(metadata)
    return LoraMismatch(
        "The LoRA has modules that the model does not have.",
        received=name if told is None else f"{name}, of a LoRA for {told}",
        accepted=f"modules of {modules.index['_class_name']}",
    )
