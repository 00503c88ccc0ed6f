"""A LoRA's source as factors by module: diffusers' own converters read the names, PEFT's rules the alphas."""

from __future__ import annotations

import inspect
import json
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

from diffusers.utils import convert_state_dict_to_peft, convert_unet_state_dict_to_peft
from diffusers.utils.state_dict_utils import StateDictType
from torch import Tensor, nn

from giornata.wire.errors import GiornataError, LoraMismatch, LoraNotSupported
from giornata_prepost.loras.checkpoint_modules import CheckpointModules

METADATA: Final = "lora_adapter_metadata"
"""Where diffusers' savers write PEFT's configuration, as JSON, in a file's metadata."""
BASE_NAMES: Final = ("modelspec.architecture", "ss_base_model_version", "base_model")
"""Where trainers write for which model they trained."""
PEFT_PREFIX: Final = "base_model.model."
CONVERTERS: Final = "diffusers.loaders.lora_conversion_utils"
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
        LoraNotSupported: diffusers cannot read it, or reads a part of it only.
        LoraMismatch: its names are those of another model.
    """
    named, alphas = _converted(_with_prefix(tensors, modules), metadata, modules)
    configuration = _configuration(metadata)
    parts = {name: _of_part(named, name) for name in (modules.network_name, *modules.text_encoders)}
    taken = {f"{part}.{name}" for part, found in parts.items() for name in found}
    if left := named.keys() - taken:
        raise _other_model(min(left), metadata, modules)
    network = _factors(
        _renamed(parts.pop(modules.network_name), _network_names),
        _of_part(alphas, modules.network_name),
        _of_part(configuration, modules.network_name),
    )
    texts = {
        name: _factors(
            _renamed(found, _text_names(modules.text_encoder(name))),
            _of_part(alphas, name),
            _of_part(configuration, name),
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
    tensors: dict[str, Tensor], metadata: Mapping[str, str], modules: CheckpointModules
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Tensors with diffusers' names, and alphas that are not in them yet."""
    read = modules.pipeline.lora_state_dict
    accepted = inspect.signature(read).parameters
    options: dict[str, Any] = {"return_alphas": True} if "return_alphas" in accepted else {}
    if modules.network_name == "unet":
        options["unet_config"] = modules.network.config
    try:
        with _complete():
            found = read(tensors, **options)
    except _FAILURES as error:
        reason = str(error) or type(error).__name__
        told = _base_of(metadata)
        raise LoraMismatch(
            f"diffusers cannot read this LoRA for the model: {reason}",
            received=told or next(iter(sorted(tensors)), "no tensors"),
            accepted=f"a LoRA for {modules.index['_class_name']}",
        ) from error
    named, alphas = found if isinstance(found, tuple) else (found, None)
    return named, {name: float(alpha) for name, alpha in (alphas or {}).items()}


@contextmanager
def _complete() -> Iterator[None]:
    """Raise LoraNotSupported where a converter warns that it leaves tensors out."""
    warnings: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())

    handler, logger = Heard(logging.WARNING), logging.getLogger(CONVERTERS)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
    left_out = [text for text in warnings if "Unsupported keys" in text]
    if left_out:
        raise LoraNotSupported("The LoRA has tensors that diffusers does not know.", received=left_out[0])


def _configuration(metadata: Mapping[str, str]) -> dict[str, Any]:
    """PEFT's configuration in the file's metadata, names beginning with the part that they are about."""
    if METADATA not in metadata:
        return {}
    try:
        told = json.loads(metadata[METADATA])
    except (ValueError, RecursionError) as error:
        raise LoraNotSupported(f"The metadata {METADATA} is not JSON.", received=str(error)) from error
    if not isinstance(told, dict):
        raise LoraNotSupported(f"The metadata {METADATA} is no object.", received=type(told).__name__)
    for name, value in told.items():
        if value and name.endswith(("use_dora", "lora_bias")):
            raise LoraNotSupported("This kind of LoRA is not supported.", received=f"{name}: {value}")
    return told


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
    tensors: Mapping[str, tuple[str, Tensor]], alphas: Mapping[str, float], configuration: Mapping[str, Any]
) -> dict[str, Factors]:
    """Pairs of factors by module, with their alphas."""
    sides: dict[str, dict[str, tuple[str, Tensor]]] = {}
    for name, told in tensors.items():
        found = _FACTOR.match(name)
        if found is None:
            raise LoraNotSupported("A tensor is no factor of a LoRA.", received=name)
        sides.setdefault(found["module"], {})[found["side"]] = told
    made = {}
    for module, pair in sides.items():
        if pair.keys() != {"A", "B"}:
            raise LoraNotSupported("A module has one factor and not two.", received=module)
        (old, down), (_, up) = pair["A"], pair["B"]
        made[module] = Factors(down, up, _alpha(module, old, down.shape[0], alphas, configuration))
    return made


def _alpha(
    module: str, old: str, rank: int, alphas: Mapping[str, float], configuration: Mapping[str, Any]
) -> float:
    """What the file says of a module; without a word, the rank, as diffusers and PEFT have it.

    Converters call a module's alpha by the module's name or by that of its first factor.
    """
    for name in (old, old.split(".lora.", maxsplit=1)[0], old.split(".lora_A.", maxsplit=1)[0], module):
        if f"{name}.alpha" in alphas:
            return alphas[f"{name}.alpha"]
    if "lora_alpha" not in configuration:
        return float(rank)
    patterns: Mapping[str, float] = configuration.get("alpha_pattern") or {}
    alpha = next(
        (alpha for pattern, alpha in patterns.items() if re.match(rf"(.*\.)?({pattern})$", module)),
        configuration["lora_alpha"],
    )
    return float(alpha) * (math.sqrt(rank) if configuration.get("use_rslora") else 1.0)


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
