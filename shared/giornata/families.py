"""The model families that are served: one table that names what a checkpoint folder is. Free of torch.

A checkpoint is a plain diffusers folder (``model_index.json``, one sub-folder per component). A new family is a row of
:data:`KINDS`, and a folder in prepost's and the denoiser's ``families``.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giornata.wire.models import ModelCard, Task

SAMPLE_BYTES: Final = 1 << 20
"""How much of each end of a weight file enters the digest; hashing all of a 24 GB checkpoint takes a minute."""
SERVING: Final = "serving.json"


class Family(StrEnum):
    """A model family, and the diffusers pipeline that it equals."""

    FLUX_INPAINT = "flux-inpaint"
    """`FluxInpaintPipeline`: any Flux text-to-image checkpoint; blends with the template after each step."""
    FLUX_FILL = "flux-fill"
    """`FluxFillPipeline`: conditioned on the masked picture; never blends."""


def _flux_channels(network: Mapping[str, Any]) -> int:
    blocks = int(network["num_layers"]) + int(network["num_single_layers"])
    return 2 * blocks * int(network["num_attention_heads"]) * int(network["attention_head_dim"])


@dataclass(frozen=True)
class Kind:
    """What all checkpoints of one kind have in common, and where their folders say the rest."""

    family: str
    takes_true_cfg: bool
    steps: int
    guidance_scale: float
    strength: float
    """Defaults of requests, unless the checkpoint has a ``serving.json``."""
    generation_guidance_scale: float | None = None
    """Default of generations; None for a kind that generates nothing."""
    unguided_steps: int | None = None
    """Default where the network embeds no guidance scale: such a checkpoint is distilled to few steps."""
    whole_latents: bool = False
    """Whether the family can tell edited from kept by whole latent pixels only."""
    token_latents: int = 2
    """Latent pixels a side of a token."""
    native_size: int = 1024
    """Pixels a side of its training pictures; used where the autoencoder does not tell."""
    network: str = "transformer"
    tokenizer: str = "tokenizer_2"
    """Sub-folders: of the denoising network, and of the tokenizer whose length prompts have."""
    max_text_tokens: int = 512
    kept_channels: Callable[[Mapping[str, Any]], int] = _flux_channels
    """Channels a token of the keys and values of all blocks, from the network's ``config.json``."""

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What its checkpoints are served for."""
        return (Task.EDIT,) if self.generation_guidance_scale is None else (Task.EDIT, Task.GENERATE)


_FLUX_INPAINT: Final = Kind(
    Family.FLUX_INPAINT,
    takes_true_cfg=True,
    steps=28,
    guidance_scale=7.0,
    strength=0.6,
    generation_guidance_scale=3.5,
    unguided_steps=4,
    whole_latents=True,
)
KINDS: Final[dict[str, Kind]] = {
    "FluxPipeline": _FLUX_INPAINT,
    "FluxInpaintPipeline": _FLUX_INPAINT,
    "FluxImg2ImgPipeline": _FLUX_INPAINT,
    "FluxFillPipeline": Kind(
        Family.FLUX_FILL, takes_true_cfg=False, steps=50, guidance_scale=30.0, strength=1.0
    ),
}
"""`_class_name` of a checkpoint's model_index.json → what it is."""


class ServingDefaults(BaseModel):
    """``serving.json`` of a checkpoint, where it has one: the defaults of requests. None: the kind's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, gt=0)
    strength: float | None = Field(None, gt=0, le=1)
    generation_guidance_scale: float | None = Field(None, gt=0)
    """Ignored by a kind that generates nothing."""


def read_model_card(folder: Path, name: str | None = None) -> ModelCard:
    """The card of the checkpoint in `folder`; requests call it `name`, by default the folder's.

    ValueError if it is no diffusers folder, of a family that is not served, or its `serving.json` is not understood.
    """
    pipeline = str(_read_json(folder / "model_index.json").get("_class_name"))
    if pipeline not in KINDS:
        raise ValueError(f"{folder} holds a {pipeline}; served are: {', '.join(KINDS)}")
    kind = KINDS[pipeline]
    network = _read_json(folder / kind.network / "config.json")
    vae = _read_json(folder / "vae" / "config.json")
    tokenizer = _read_json(folder / kind.tokenizer / "tokenizer_config.json")
    missing = {"block_out_channels", "latent_channels"} - vae.keys()
    if missing:
        raise ValueError(f"{folder / 'vae'} is not an AutoencoderKL of diffusers: {sorted(missing)} missing")
    defaults = _serving_defaults(folder / SERVING)
    takes_guidance = bool(network.get("guidance_embeds", False))
    steps = kind.steps if takes_guidance else kind.unguided_steps or kind.steps
    vae_scale_factor = 2 ** (len(vae["block_out_channels"]) - 1)
    return ModelCard(
        name=name or folder.resolve().name,
        family=kind.family,
        digest=digest(folder),
        vae_scale_factor=vae_scale_factor,
        token_latents=kind.token_latents,
        mask_grain=vae_scale_factor if kind.whole_latents else 1,
        latent_channels=int(vae["latent_channels"]),
        max_text_tokens=int(min(kind.max_text_tokens, tokenizer.get("model_max_length", math.inf))),
        takes_guidance=takes_guidance,
        takes_true_cfg=kind.takes_true_cfg,
        default_steps=defaults.steps or steps,
        default_guidance_scale=defaults.guidance_scale or kind.guidance_scale,
        default_strength=defaults.strength or kind.strength,
        tasks=kind.tasks,
        generation_guidance_scale=_of_generations(kind, defaults),
        native_size=int(vae.get("sample_size", kind.native_size)),
    )


def level_bytes(folder: Path, card: ModelCard, bits: int) -> int:
    """Bytes of one noise level of a template, as keys and values in so many `bits`, of a picture of the native size.

    ValueError if the checkpoint's network does not tell its shape.
    """
    kind = KINDS[str(_read_json(folder / "model_index.json").get("_class_name"))]
    try:
        channels = kind.kept_channels(_read_json(folder / kind.network / "config.json"))
    except KeyError as error:
        raise ValueError(
            f"{folder / kind.network} is not a network of diffusers: {error} is missing"
        ) from error
    return (card.native_size // card.pixel_multiple) ** 2 * channels * bits // 8


def _of_generations(kind: Kind, defaults: ServingDefaults) -> float | None:
    if kind.generation_guidance_scale is None:
        return None
    return defaults.generation_guidance_scale or kind.generation_guidance_scale


def _serving_defaults(path: Path) -> ServingDefaults:
    if not path.exists():
        return ServingDefaults()
    try:
        return ServingDefaults.model_validate(_read_json(path))
    except ValidationError as error:
        raise ValueError(f"{path} is not understood: {error}") from error


def digest(folder: Path) -> str:
    """sha-256 over every JSON and text file of a checkpoint, and over size, header and both ends of its weights."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder).as_posix()
        if path.suffix == ".safetensors":
            total.update(relative.encode() + struct.pack("<Q", path.stat().st_size))
            total.update(_both_ends(path))
        elif path.suffix in {".json", ".txt", ".model"}:
            total.update(relative.encode() + b"\0" + path.read_bytes())
    return total.hexdigest()


def _both_ends(path: Path) -> bytes:
    with path.open("rb") as file:
        head = file.read(SAMPLE_BYTES)
        file.seek(max(len(head), path.stat().st_size - SAMPLE_BYTES))
        return head + file.read(SAMPLE_BYTES)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path.parent} is not part of a diffusers checkpoint: {path.name} is missing"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object")  # noqa: TRY004 - the file's content is at fault, not a type
    return content
