"""A LoRA's source as factors by module, in any trainer's names."""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, TypeAlias

import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StringConstraints, ValidationError
from torch import Tensor

from giornata.lora_files import ALPHA, read_factor_name
from giornata.wire.errors import LoraMismatch, LoraNotSupported
from giornata_prepost.loras.canonical import DOWN, UP

if TYPE_CHECKING:
    from giornata_prepost.loras.normalisation import CheckpointModules

# PEFT's configuration in a LoRA's metadata: typed, and without its regular expressions.


METADATA: Final = "lora_adapter_metadata"
"""Where diffusers' savers write PEFT's configuration, as JSON, in a file's metadata."""
ACCEPTED: Final = "PEFT's fields: lora_alpha a number, alpha_pattern an object of numbers by names of modules"
_PATTERN: Final = r"^\^?[A-Za-z0-9_.-]{1,512}\$?$"
_MOST: Final = 65536.0

Alpha = Annotated[StrictFloat, Field(ge=-_MOST, le=_MOST, allow_inf_nan=False)]
ModulePattern = Annotated[str, StringConstraints(pattern=_PATTERN)]


class AdapterConfig(BaseModel):
    """The fields that count of one part's configuration.

    PEFT reads the keys of `alpha_pattern` as regular expressions of module names. A file comes from a stranger, and
    such an expression may take for ever, so a key is taken as it stands: the name of a module or the end of it, after
    a dot. That is what trainers and diffusers write; `^` before it asks for the whole name.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_alpha: Alpha | None = None
    alpha_pattern: Annotated[dict[ModulePattern, Alpha], Field(max_length=4096)] | None = None
    use_rslora: StrictBool | None = False

    def alpha(self, module: str, rank: int) -> float:
        """Return what the configuration says of a module; without a word, the rank, as diffusers and PEFT have it."""
        if self.lora_alpha is None:
            return float(rank)
        ends = {module[at:] for at in (0, *(dot.end() for dot in re.finditer(r"\.", module)))} | {
            f"^{module}"
        }
        alpha = next(
            (alpha for name, alpha in (self.alpha_pattern or {}).items() if name.removesuffix("$") in ends),
            self.lora_alpha,
        )
        return alpha * (math.sqrt(rank) if self.use_rslora else 1.0)


def read_configs(metadata: Mapping[str, str], parts: tuple[str, ...]) -> dict[str, AdapterConfig]:
    """The configuration of each of `parts`, whose names stand before the fields' with a dot.

    Raises:
        LoraNotSupported: it is no such configuration, or one of a kind of LoRA that is not supported.
    """
    try:
        told = json.loads(metadata.get(METADATA, "{}"))
    except (ValueError, RecursionError) as error:
        raise LoraNotSupported(
            f"The metadata {METADATA} is not JSON.", received=error, accepted=ACCEPTED
        ) from error
    if not isinstance(told, dict):
        raise LoraNotSupported(
            f"The metadata {METADATA} is no object.", received=type(told).__name__, accepted=ACCEPTED
        )
    for name, value in told.items():
        if value and name.endswith(("use_dora", "lora_bias")):
            raise LoraNotSupported("This kind of LoRA is not supported.", received=f"{name}: {value}")
    return {part: _config(told, f"{part}.") for part in parts}


def _config(told: Mapping[str, object], prefix: str) -> AdapterConfig:
    own = {name.removeprefix(prefix): value for name, value in told.items() if name.startswith(prefix)}
    try:
        return AdapterConfig.model_validate(own)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(one) for one in first["loc"] if one != "[key]")
        raise LoraNotSupported(
            f"The metadata {METADATA} has a field that is not accepted: {first['msg']}.",
            received=f"{prefix}{field}: {first['input']!r}",
            accepted=ACCEPTED,
        ) from error


# A LoRA's source as factors by module: diffusers' own converters read the names, trainers' rules the
# alphas.
#
# Converters get the factors alone. An alpha is one of the file's own modules, and scales what is made of
# it: some converters leave alphas out, or ask for one where there is none.


class ProvenanceTensor(Tensor):
    """A tensor that knows from which sources it was computed; so does every result of an operation on it."""

    sources: frozenset[str] = frozenset()
    """Names of the source's tensors."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Carry out an operation. Its result has the sources of all its operands."""
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch annotates it in part
        operands = _traced((*args, *(kwargs or {}).values()))
        sources = frozenset[str]().union(*(operand.sources for operand in operands))
        for made in _traced((result,)):
            made.sources = sources
        return result


def traced(name: str, tensor: Tensor) -> ProvenanceTensor:
    """The same tensor as its own source."""
    made = tensor.as_subclass(ProvenanceTensor)
    made.sources = frozenset({name})
    return made


def untraced(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor.as_subclass(torch.Tensor)


def _traced(values: Iterable[Any]) -> Iterable[ProvenanceTensor]:
    for value in values:
        if isinstance(value, ProvenanceTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _traced(value)


BASE_NAMES: Final = ("modelspec.architecture", "ss_base_model_version", "base_model")
"""Where trainers write for which model they trained."""
_FAILURES: Final = (
    ValueError, KeyError, IndexError, AssertionError, NotImplementedError, RuntimeError, AttributeError,
)  # fmt: skip
"""What diffusers' converters raise where a file is not as they expect."""
_WHOLE: Final = re.compile(r"(?P<block>.+attention[._])(?P<projection>qkv|out)")
"""A projection under the name of the original Z-Image, whose parts diffusers names one by one."""
_PARTS: Final = {"qkv": ("to_q", "to_k", "to_v"), "out": ("to_out.0",)}


class LoraFactors(NamedTuple):
    """One module's."""

    down: Tensor
    """(rank, in), or (rank, in, height, width) of a convolution."""
    up: Tensor
    """(out, rank), or (out, rank, 1, 1)."""
    scale: float
    """The product counts so many times: alpha / rank."""


Named: TypeAlias = Mapping[str, ProvenanceTensor]
"""Factors by a name of theirs."""
Reading: TypeAlias = Callable[[Named, "CheckpointModules"], Mapping[str, Tensor]]
"""Renames factors, and splits those of modules that are one in the file and several in diffusers."""
Placed: TypeAlias = dict[tuple[str, str], dict[bool, ProvenanceTensor]]
"""Factors by part and module; the first one's key is true."""


def read_source(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], modules: CheckpointModules
) -> dict[str, dict[str, LoraFactors]]:
    """The factors in a file of any naming, by module, by part: the network, and text encoders.

    The first reading counts that finds a place for every factor.

    Raises:
        LoraNotSupported: a module lacks a factor, alphas are told of some modules only, or PEFT's configuration in the
            metadata is none.
        LoraMismatch: its names are those of another model.
    """
    scales = _scales(tensors, modules)
    configs = read_configs(metadata, tuple(modules.parts))
    named = {name: traced(name, tensor) for name, tensor in tensors.items() if not name.endswith(ALPHA)}
    best, dropped, width = sorted(named), False, ""
    for reading in READINGS:
        try:
            renamed = reading(named, modules)
        except _FAILURES as error:
            if isinstance(error, AssertionError):
                width = ", or diffusers splits them in models of the published width alone"
            continue
        placed = _placed(renamed, modules)
        left = _left(named, renamed, placed, modules)
        if not left:
            return _factors(placed, scales, configs)
        if len(left) < len(best):
            best, dropped = left, not _sources(renamed.values()).intersection(left)
    idle = {_module(name) for name, factor in named.items() if not factor.any()}
    trained = {name: tensor for name, tensor in tensors.items() if _module(name) not in idle}
    if idle and trained:  # products of zeros change nothing, whatever their modules are
        return read_source(trained, metadata, modules)
    if dropped:
        raise LoraNotSupported(
            "diffusers reads this LoRA without some of its tensors.",
            received=f"{best[0]}, one of {len(best)}",
            accepted="files of which every tensor counts",
        )
    texts = [name for name in best if name.startswith(("text_encoder", "lora_te"))]
    best = [name for name in texts if modules.split(name)[0] == modules.network_name] or best
    told = next((metadata[name] for name in BASE_NAMES if metadata.get(name)), None)
    raise LoraMismatch(
        f"The LoRA has modules that the model does not have{width}.",
        received=f"{best[0]}, one of {len(best)}" + ("" if told is None else f", of a LoRA for {told}"),
        accepted=f"linear layers and convolutions of {modules.index['_class_name']}",
    )


def _module(name: str) -> str:
    """The file's own module of a factor or an alpha."""
    found = read_factor_name(name)
    return found.module if found else name.removesuffix(ALPHA)


def _by_loader(named: Named, modules: CheckpointModules) -> Mapping[str, Tensor]:
    """As the pipeline's own loader reads a file."""
    options = {"unet_config": modules.network.config} if modules.network_name == "unet" else {}
    found = modules.pipeline.lora_state_dict(dict(named), **options)
    converted: dict[str, Tensor] = found[0] if isinstance(found, tuple) else found
    return converted


def _like_kohya(named: Named, modules: CheckpointModules) -> Mapping[str, Tensor]:
    """As the loader reads kohya's spelling of the same names: `lora_unet_….lora_down.weight`."""
    return _by_loader(
        _respelled(named, modules, "lora_unet_", "_", (".lora_up.weight", ".lora_down.weight")), modules
    )


def _like_ai_toolkit(named: Named, modules: CheckpointModules) -> Mapping[str, Tensor]:
    """As the loader reads ai-toolkit's spelling of the same names: `diffusion_model.….lora_A.weight`."""
    return _by_loader(
        _respelled(named, modules, "diffusion_model.", ".", (".lora_B.weight", ".lora_A.weight")), modules
    )


def _respelled(
    named: Named, modules: CheckpointModules, prefix: str, dot: str, sides: tuple[str, str]
) -> dict[str, ProvenanceTensor]:
    respelled = {}
    for name, tensor in named.items():
        part, rest = modules.split(name)
        found = read_factor_name(rest)
        if found is not None:
            before = prefix if part == modules.network_name else f"lora_te{part.partition('r_')[2] or 1}_"
            respelled[f"{before}{found.module.replace('.', dot)}{sides[found.is_down]}"] = tensor
    return respelled


class _OriginalWeights(dict[str, Tensor]):
    """Weights of an original checkpoint: second factors where the file has them, else nothing that counts."""

    def __init__(self, factors: Mapping[str, ProvenanceTensor], known: Iterable[str]) -> None:
        super().__init__(dict.fromkeys(known, torch.zeros(6)))
        self._factors = factors

    def pop(self, name: str, *_default: object) -> Tensor:
        """A weight, or six numbers, of which each part of a split has some."""
        return self._factors.get(name.removesuffix(".weight").replace(".", "_"), torch.zeros(6))


def _by_checkpoint(named: Named, modules: CheckpointModules) -> Mapping[str, Tensor]:
    """Names of the original SD3, for which diffusers has a converter of checkpoints alone, and none of LoRAs.

    It splits and swaps the rows of weights, and so those of second factors.
    """
    if type(modules.network).__name__ != "SD3Transformer2DModel":
        return {}
    flat = _respelled(named, modules, "", "_", (UP, DOWN))
    ups = {name.removesuffix(UP): one for name, one in flat.items() if name.endswith(UP)}
    config = modules.network.config
    known = [f"joint_blocks.{index}.x_block.attn2." for index in config.dual_attention_layers]
    known += [f"joint_blocks.{config.num_layers - 1}.", "context_embedder.weight"]
    weights = convert_sd3_transformer_checkpoint_to_diffusers(_OriginalWeights(ups, known))
    of_source = {source: name for name, one in ups.items() for source in one.sources}
    converted = {name: one for name, one in named.items() if modules.split(name)[0] != modules.network_name}
    for name, up in weights.items():
        if isinstance(up, ProvenanceTensor):
            module = name.removesuffix(".weight")
            (source,) = up.sources
            converted[f"{module}.lora_B.weight"] = up
            converted[f"{module}.lora_A.weight"] = flat[of_source[source] + DOWN]
    return converted


READINGS: Final[tuple[Reading, ...]] = (
    _by_loader,
    lambda named, _: named,  # of the model's own modules, which need no converter
    _like_kohya,
    _like_ai_toolkit,
    _by_checkpoint,
)


def _placed(named: Mapping[str, Tensor], modules: CheckpointModules) -> Placed:
    """The factors whose names are those of modules."""
    placed: Placed = {}
    for name, factor in named.items():
        found = modules.find(name)
        if found is None or not isinstance(factor, ProvenanceTensor):
            continue
        part, path, is_down = found
        if is_down in placed.setdefault((part, path), {}):
            raise LoraNotSupported("Two tensors are the same factor of one module.", received=name)
        placed[part, path][is_down] = factor
    return placed


def _left(
    named: Named, renamed: Mapping[str, Tensor], placed: Placed, modules: CheckpointModules
) -> list[str]:
    """Names of the factors without a place, or without one for all that is made of them, if anything is missing."""
    used = _sources(one for pair in placed.values() for one in pair.values())
    used -= _sources(one for name, one in renamed.items() if modules.find(name) is None)
    left = sorted(named.keys() - used)
    return [name for name in left if not _is_repeated(name, placed, modules)]


def _sources(tensors: Iterable[Tensor]) -> frozenset[str]:
    """Names of the factors of which tensors are made."""
    return frozenset[str]().union(*(one.sources for one in tensors if isinstance(one, ProvenanceTensor)))


def _is_repeated(name: str, placed: Placed, modules: CheckpointModules) -> bool:
    """Return whether a factor's module is a whole projection of Z-Image, whose parts are in the file as well.

    As diffusers has it, they are the same: some trainers write both.
    """
    found = read_factor_name(name)
    whole = _WHOLE.fullmatch(found.module) if found else None
    if whole is None:
        return False
    parts = (modules.find_module(whole["block"] + each) for each in _PARTS[whole["projection"]])
    return all(part in placed for part in parts)


def _scales(tensors: Mapping[str, Tensor], modules: CheckpointModules) -> dict[str, float]:
    """Alpha / rank by the file's own modules; empty where it has no alphas.

    A module without an alpha has its rank, as trainers have it. Where diffusers gives it the alpha that most others
    have, such a file is refused.
    """
    ranks = {
        found.module: tensor.shape[0]
        for name, tensor in tensors.items()
        if (found := read_factor_name(name)) and found.is_down
    }
    alphas = {name.removesuffix(ALPHA): tensor for name, tensor in tensors.items() if name.endswith(ALPHA)}
    if stray := alphas.keys() - ranks.keys():
        raise LoraNotSupported("An alpha belongs to no module with factors.", received=min(stray) + ALPHA)
    missing = sorted(ranks.keys() - alphas.keys())
    if alphas and missing and _guesses_alphas(tensors, modules):
        raise LoraNotSupported(
            "Some modules have an alpha and others have none.",
            received=f"{missing[0]} without one",
            accepted="an alpha for every module, or for none",
        )
    if not alphas:
        return {}
    return {name: float(alphas[name]) / rank if name in alphas else 1.0 for name, rank in ranks.items()}


def _guesses_alphas(names: Iterable[str], modules: CheckpointModules) -> bool:
    """Return whether diffusers' loader hands alphas on to PEFT, and does not scale factors by them itself."""
    if modules.network_name == "unet":
        return True
    hands_on = "return_alphas" in inspect.signature(modules.pipeline.lora_state_dict).parameters
    return hands_on and not any(".lora_down." in name for name in names)


def _factors(
    placed: Placed, scales: Mapping[str, float], configs: Mapping[str, AdapterConfig]
) -> dict[str, dict[str, LoraFactors]]:
    """Pairs of factors, with their scales."""
    made: dict[str, dict[str, LoraFactors]] = {}
    for (part, module), pair in placed.items():
        if len(pair) != 2:
            raise LoraNotSupported("A module has one factor and not two.", received=f"{part}.{module}")
        down, up = pair[True], pair[False]
        rank = down.shape[0]
        own = _module(min(down.sources))
        scale = scales[own] if scales else configs[part].alpha(module, rank) / rank
        made.setdefault(part, {})[module] = LoraFactors(untraced(down), untraced(up), scale)
    return made
