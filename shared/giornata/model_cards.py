"""The card of a checkpoint or a ControlNet, read from its folder, and the memory that it takes. Free of torch."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giornata.checkpoints import chosen_weights, unloadable
from giornata.component_configs import CheckpointConfigs, Config, LatentShape, sampler_of
from giornata.control.layout import control_input
from giornata.families import KINDS, CheckpointKind, Family
from giornata.wire.adapters import ControlCard, ControlKind
from giornata.wire.models import DISCRETE_TIME, ModelCard

# The memory plan of one device: what a checkpoint's parts take there, and which of them fit together.
#
# Where denoiser and prepost share a device, the network and one row come first, then a picture that is decoded as a
# whole, then text encoders. Rows share what is left.


USABLE: Final = 0.95
"""Share of a device that is planned with: allocators leave gaps."""
CONTEXT_BYTES: Final = 600 << 20
"""What CUDA and its libraries take of a device for each process."""
TILE: Final = 512
"""Pixels a side of the tiles in which pictures pass an autoencoder that has no room for the whole."""
QUANTIZED: Final = 0.55
"""A network whose blocks have 8 bits, against 16: embedders and modulation keep theirs."""


class ModelMemory(NamedTuple):
    """The memory that a checkpoint takes of a device, in bytes of the dtype in which it is served there."""

    network: int
    encoders: int
    autoencoder: int
    """Weights, of all text encoders together."""
    pixel: float
    """Most that a pixel of a picture takes while it is decoded."""
    token: float
    """Most that a row takes for each token: activations of a step, and what it takes from a template and learns."""
    pixels_a_token: float
    text_tokens: int

    def row(self, pixels: int) -> int:
        """A row of a picture of so many pixels."""
        return round(self.token * (pixels / self.pixels_a_token + self.text_tokens))

    def denoiser(self, pixels: int, rows: int = 1) -> int:
        """A denoiser with so many rows in a step."""
        return CONTEXT_BYTES + self.network + rows * self.row(pixels)

    def prepost(self, whole_pixels: int, *, encoders: bool) -> int:
        """A prepost that decodes pictures of so many pixels as a whole, with or without its text encoders."""
        return CONTEXT_BYTES + self.autoencoder + encoders * self.encoders + round(self.pixel * whole_pixels)


class PrepostPlan(NamedTuple):
    """The memory and the placement of prepost's models on a device."""

    encoders: bool
    """Whether the text encoders are there; else they are on the CPU."""
    whole_pixels: int
    """Pictures of up to so many pixels pass the autoencoder as a whole, larger ones in tiles."""
    size_bytes: int


def plan_prepost(room: float, model: ModelMemory, pixels: int, encoders: bool | None = None) -> PrepostPlan:  # noqa: FBT001 - None decides
    """Plan a prepost in `room` bytes for pictures of up to so many pixels; `encoders` None: they are there if they fit.

    It has one tile at least, even if that does not fit.
    """
    if encoders is None:
        encoders = model.prepost(pixels, encoders=True) <= room
    left = room - model.prepost(0, encoders=encoders)
    whole = max(TILE**2, min(pixels, int(left // model.pixel)))
    return PrepostPlan(encoders, whole, model.prepost(whole, encoders=encoders))


def plan_device(device_bytes: int, model: ModelMemory, pixels: int) -> tuple[PrepostPlan, int]:
    """A prepost, and the rows of so many pixels that a step of a denoiser beside it has; below 1, they do not fit."""
    room = USABLE * device_bytes
    prepost = plan_prepost(room - model.denoiser(pixels), model, pixels)
    return prepost, int((room - prepost.size_bytes - model.denoiser(pixels, 0)) // model.row(pixels))


SAMPLE_BYTES: Final = 1 << 20
"""How much of each end of a weight file enters the digest; hashing all of a 24 GB checkpoint takes a minute."""
HEADER_BYTES: Final = 100 << 20
"""Of a safetensors file, at most: the format's own limit."""
SERVING: Final = "serving.json"
ITEM_BYTES: Final = 2
"""Of a number on a GPU by default: bfloat16."""
TEMPLATE_BITS: Final = 4
"""Bits of a recorded value, as a denoiser has them by default."""
STEP_NUMBERS: Final = 20
"""Numbers that a step has at its peak for each token and channel: 13 to 18, and more with rows of unlike lengths."""


class ServingDefaults(BaseModel):
    """``serving.json`` of a checkpoint, where it has one: the defaults of requests. None: the kind's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, ge=0)
    true_cfg_scale: float | None = Field(None, ge=1)
    strength: float | None = Field(None, gt=0, le=1)
    generation_guidance_scale: float | None = Field(None, ge=0)
    generation_steps: int | None = Field(None, ge=1)
    """Both are ignored by a kind that generates nothing. Without the latter, `steps` holds for generations too."""


def read_model_card(folder: Path, name: str | None = None) -> ModelCard:
    """The card of the checkpoint in `folder`; requests call it `name`, by default the folder's.

    ValueError if it is no diffusers folder, of a family or a variant that is not served, or its `serving.json` is not
    understood.
    """
    index = _read_json(folder / "model_index.json")
    kind = _kind(folder, index)
    for config in sorted(folder.glob("*/config.json")):
        if (reason := unloadable(_read_json(config))) is not None:
            raise ValueError(f"{folder} cannot be served: its {config.parent.name} {reason}")
    configs = CheckpointConfigs(
        index,
        _read_json(folder / kind.network / "config.json"),
        _read_json(folder / "scheduler" / "scheduler_config.json", optional=True),
        _read_json(folder / "vae" / "config.json"),
    )
    latents = _latent_shape(folder, kind, configs)
    kind = kind.of(_served_family(folder, kind, configs))
    tokenizer = _read_json(folder / kind.tokenizer / "tokenizer_config.json", optional=True)
    discrete = kind.samplers is DISCRETE_TIME
    padded = int(min(kind.max_text_tokens, tokenizer.get("model_max_length", math.inf)))
    return ModelCard(
        name=name or folder.resolve().name,
        family=kind.family,
        digest=digest(folder),
        vae_scale_factor=latents.scale_factor,
        token_latents=kind.token_latents,
        mask_grain=max(1, kind.mask_latents * latents.scale_factor),
        latent_channels=latents.channels,
        max_text_tokens=padded + kind.other_text_tokens,
        max_prompt_tokens=_max_prompt_tokens(folder, kind, padded),
        takes_true_cfg=kind.takes_true_cfg,
        reuses=kind.reuses,
        step_caches=kind.step_caches,
        samplers=kind.samplers,
        default_sampler=sampler_of(configs.scheduler) if discrete else kind.samplers[0],
        keeps_whole_steps=discrete,
        native_size=_native_size(kind, configs, latents),
        references=kind.references,
        max_references=kind.max_references,
        replaces_own=kind.replaces_own,
        causal_references=kind.causal_references,
        token_multiple=kind.token_multiple,
        tasks=kind.tasks,
        **_guidance(kind, configs, _serving_defaults(folder / SERVING)),
    )


def level_bytes(folder: Path, card: ModelCard, bits: int) -> int:
    """Bytes of one noise level of a template in so many `bits`, of a picture of the native size and its companions.

    ValueError if the checkpoint's network does not tell its shape.
    """
    kind = _kind(folder, _read_json(folder / "model_index.json"))
    try:
        kept = kind.kept_channels(_read_json(folder / kind.network / "config.json"))
    except KeyError as error:
        raise ValueError(
            f"{folder / kind.network} is not a network of diffusers: {error} is missing"
        ) from error
    tokens = (card.native_size // card.pixel_multiple) ** 2
    return kept.size_bytes(tokens + card.companion_tokens(tokens), bits)


def model_memory(folder: Path, item_bytes: int = ITEM_BYTES, *, quantized: bool = False) -> ModelMemory:
    """What the checkpoint in `folder` takes on a GPU in numbers of `item_bytes`, or with 8 bits for blocks' weights.

    Raises:
        ValueError: it is not served, or neither weights nor an index tell the size of a part.
        OSError: a file cannot be read.
    """
    card, index = read_model_card(folder), _read_json(folder / "model_index.json")
    kind = _kind(folder, index)
    network, autoencoder = (_read_json(folder / part / "config.json") for part in (kind.network, "vae"))
    # As prepost loads it: activations of SDXL's overflow in 16 bits.
    upcast = card.family.startswith("sdxl") and autoencoder.get("force_upcast", True)
    coded_bytes = max(item_bytes, 4 * upcast)
    tokens = (card.native_size // card.pixel_multiple) ** 2
    beside = tokens + card.companion_tokens(tokens)
    try:
        step, pixel = STEP_NUMBERS * _width(network, card.token_latents), _decoding_numbers(autoencoder)
    except KeyError as error:
        raise ValueError(f"{folder} does not tell its shape: {error} is missing") from error
    return ModelMemory(
        round(_weights(folder / kind.network, item_bytes) * (QUANTIZED if quantized else 1)),
        sum(
            _weights(folder / one, item_bytes)
            for one in index
            if one.startswith("text_encoder") and (folder / one).is_dir()
        ),
        _weights(folder / "vae", coded_bytes),
        coded_bytes * pixel,
        # an entry of a template, and a correction of its size
        item_bytes * step + 2 * level_bytes(folder, card, TEMPLATE_BITS) / beside,
        card.pixel_multiple**2 * tokens / beside,
        card.max_text_tokens if kind.network == "transformer" else 0,
    )


def _width(network: Config, tile: int) -> int:
    """Channels of a token: of a UNet's, all cells of a tile where it is widest."""
    if "block_out_channels" in network:
        return int(tile**2 * network["block_out_channels"][0])
    return int(network.get("dim") or network["num_attention_heads"] * network["attention_head_dim"])


def _decoding_numbers(autoencoder: Config) -> float:
    """Most numbers that a pixel has while it is decoded: of Qwen-Image 2.1, Qwen-Image, and all others."""
    if "decoder_base_dim" in autoencoder:
        return 22.4 * int(autoencoder["decoder_base_dim"])
    if "base_dim" in autoencoder:
        return 18.1 * int(autoencoder["base_dim"])
    channels = autoencoder.get("decoder_block_out_channels") or autoencoder["block_out_channels"]
    return 3.02 * int(channels[:2][-1])


def _weights(part: Path, item_bytes: int) -> int:
    """Bytes of a component's weights as they are loaded; an index alone is taken for one of numbers in 16 bits."""
    if files := chosen_weights(map(str, part.glob("*.safetensors"))):
        return item_bytes * sum(_numbers(Path(file)) for file in files)
    for index in sorted(part.glob("*.safetensors.index.json")):
        return int(_read_json(index)["metadata"]["total_size"]) * item_bytes // ITEM_BYTES
    raise ValueError(f"{part} has neither weights nor an index that tells their size")


def _numbers(file: Path) -> int:
    with file.open("rb") as opened:
        header = json.loads(opened.read(min(HEADER_BYTES, int.from_bytes(opened.read(8), "little"))))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _max_prompt_tokens(folder: Path, kind: CheckpointKind, padded: int) -> int | None:
    if kind.prompt_frame is None:
        return None
    if kind.family != Family.SD3:
        return kind.text_chunks * (padded - kind.prompt_frame)
    clip, has_t5 = kind.other_text_tokens - 2, (folder / kind.tokenizer).is_dir()
    return max(clip, padded - kind.prompt_frame) if has_t5 else clip


def _kind(folder: Path, index: Mapping[str, Any]) -> CheckpointKind:
    pipeline = str(index.get("_class_name"))
    if pipeline not in KINDS:
        named = {name.removesuffix("Pipeline"): name for name in KINDS}
        close = get_close_matches(pipeline.removesuffix("Pipeline"), named, n=1, cutoff=0.7)
        closest = "".join(f"; the closest that is: {named[one]}" for one in close)
        raise ValueError(
            f"{folder} holds a {pipeline}, which is not served{closest}. All that are: {', '.join(KINDS)}"
        )
    return KINDS[pipeline]


def _latent_shape(folder: Path, kind: CheckpointKind, configs: CheckpointConfigs) -> LatentShape:
    try:
        return kind.latent_shape(configs.autoencoder)
    except KeyError as error:
        raise ValueError(
            f"{folder / 'vae'} is not an {kind.autoencoder} of diffusers: {error} is missing"
        ) from error


def _served_family(folder: Path, kind: CheckpointKind, configs: CheckpointConfigs) -> str:
    """The family of a checkpoint; ValueError if this variant of it is not served."""
    if (reason := kind.unserved(configs)) is not None:
        raise ValueError(f"{folder} cannot be served: {reason}")
    if kind.by_input_channels is None:
        return kind.family
    channels = int(configs.network.get("in_channels", 0))
    if channels not in kind.by_input_channels:
        raise ValueError(
            f"{folder} cannot be served: its {kind.network} has {channels} input channels; served are "
            f"{' and '.join(map(str, kind.by_input_channels))}"
        )
    return kind.by_input_channels[channels]


def _guidance(kind: CheckpointKind, configs: CheckpointConfigs, told: ServingDefaults) -> dict[str, Any]:
    """The card's defaults, and what guidance it takes."""
    distilled = kind.distilled if kind.distilled and kind.distilled.told(configs) else None
    scale = distilled.guidance_scale if distilled else None
    if kind.guided_above is None:
        takes_guidance = bool(configs.network.get("guidance_embeds", kind.embeds_guidance))
    else:
        takes_guidance = distilled is None or scale is not None
    generates = kind.generation_guidance_scale is not None
    own_steps = kind.generation_steps if distilled is None and told.steps is None else None
    return {
        "takes_guidance": takes_guidance,
        "guided_above": kind.guided_above if takes_guidance else None,
        "default_steps": told.steps or (distilled or kind).steps,
        "default_guidance_scale": _first(told.guidance_scale, scale, kind.guidance_scale),
        "generation_guidance_scale": (
            _first(told.generation_guidance_scale, scale, kind.generation_guidance_scale)
            if generates
            else None
        ),
        "generation_steps": (told.generation_steps or own_steps) if generates else None,
        "default_true_cfg_scale": told.true_cfg_scale or kind.true_cfg_scale,
        "default_strength": told.strength or kind.strength,
    }


def _first(*scales: float | None) -> float | None:
    return next((scale for scale in scales if scale is not None), None)


def _native_size(kind: CheckpointKind, configs: CheckpointConfigs, latents: LatentShape) -> int:
    if not kind.network_size:
        return int(configs.autoencoder.get("sample_size", kind.native_size))
    sides = configs.network.get("sample_size", kind.native_size // latents.scale_factor)
    return latents.scale_factor * int(min(sides) if isinstance(sides, list) else sides)


def digest(folder: Path) -> str:
    """sha-256 over every JSON and text file of a checkpoint, and over size, header and both ends of its weights.

    Variants of weights that are not loaded do not count: a download leaves them out.
    """
    total = hashlib.sha256()
    loaded = chosen_weights(path.relative_to(folder).as_posix() for path in folder.rglob("*.safetensors"))
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            if relative not in loaded:
                continue
            total.update(relative.encode() + struct.pack("<Q", path.stat().st_size))
            total.update(_both_ends(path))
        elif path.suffix in {".json", ".txt", ".model", ".jinja"}:
            total.update(relative.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _both_ends(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(len(head), path.stat().st_size - SAMPLE_BYTES))
        return head + file.read(SAMPLE_BYTES)


def _serving_defaults(path: Path) -> ServingDefaults:
    try:
        return ServingDefaults.model_validate(_read_json(path, optional=True))
    except ValidationError as error:
        raise ValueError(f"{path} is not understood: {error}") from error


def _read_json(
    path: Path, whole: str = "part of a diffusers checkpoint", *, optional: bool = False
) -> dict[str, Any]:
    """The object in a file; nothing where it is `optional` and missing. ValueError says what `whole` is not."""
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path.parent} is not {whole}: {path.name} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")  # noqa: TRY004 - the file's content is at fault, not a type
    return content


CONTROL_KINDS: Final[Mapping[str, ControlKind]] = {
    "FluxControlNetModel": ControlKind.FLUX,
    "SD3ControlNetModel": ControlKind.SD3,
    "ControlNetModel": ControlKind.UNET,
}
TEXT: Final[Mapping[ControlKind, str]] = {
    ControlKind.FLUX: "joint_attention_dim",
    ControlKind.SD3: "joint_attention_dim",
    ControlKind.UNET: "cross_attention_dim",
}
"""Where a configuration tells the width of the text embeddings."""
FIXED: Final[Mapping[str, tuple[object, ...]]] = {
    "class_embed_type": (None,),
    "num_class_embeds": (None,),
    "encoder_hid_dim_type": (None,),
    "addition_embed_type": (None, "text_time"),
    "global_pool_conditions": (False,),
}
"""Options of a ControlNet of UNets, and what is served; diffusers' defaults for what is missing are among it."""


def read_control_card(folder: Path, name: str | None = None) -> ControlCard:
    """The card of the ControlNet in `folder`; requests call it `name`, by default the folder's.

    Raises:
        ValueError: it holds no ControlNet, or one that is not served; says what is.
    """
    config = _read_json(folder / "config.json", "a ControlNet of diffusers")
    network = str(config.get("_class_name"))
    if network not in CONTROL_KINDS:
        raise ValueError(f"{folder} holds a {network}; served ControlNets are: {', '.join(CONTROL_KINDS)}")
    kind = CONTROL_KINDS[network]
    if (reason := _unserved(kind, config)) is not None:
        raise ValueError(f"{folder} cannot be served: {reason}")
    weights = sum(
        Path(path).stat().st_size for path in chosen_weights(map(str, folder.glob("*.safetensors")))
    )
    if not weights:
        raise ValueError(f"{folder} holds no *.safetensors; other formats are not read")
    return ControlCard(
        name=name or folder.resolve().name,
        digest=digest(folder),
        kind=kind,
        text_channels=int(config[TEXT[kind]]),
        modes=int(config.get("num_mode") or 0),
        sees=control_input(config),
        weight_bytes=weights,
    )


def _unserved(kind: ControlKind, config: Mapping[str, Any]) -> str | None:
    """Return why a ControlNet is not served, as the end of a sentence; None where it is."""
    if (reason := unloadable(config)) is not None:
        return f"it {reason}"
    if not isinstance(config.get(TEXT[kind]), int):
        return f"its {TEXT[kind]} is {config.get(TEXT[kind])}; served is a number of channels"
    placed = config.get("use_pos_embed", True) and config.get("pos_embed_type", "sincos") is not None
    if kind is ControlKind.SD3 and not placed:
        return "it has no positions of its own"
    if kind is not ControlKind.UNET:
        return None
    for option, served in FIXED.items():
        if (found := config.get(option, served[0])) not in served:
            return f"its {option} is {found}; served is {' or '.join(map(str, served))}"
    return None
