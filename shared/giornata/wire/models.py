"""What a checkpoint is, read from its folder without torch: family, geometry, defaults, digest.

A checkpoint is a plain diffusers folder (``model_index.json``, one sub-folder per component). The digest lets a
rolling model change never mix two autoencoders: it travels with every job and every worker's state.
"""

from __future__ import annotations

import hashlib
import json
import struct
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

SAMPLE_BYTES = 1 << 20
"""How much of each end of a weight file enters the digest; hashing all of a 24 GB checkpoint takes a minute."""


NATIVE_SIZE = 1024
"""Pixels a side that Flux was trained for; used where a checkpoint does not tell its own."""


SERVING = "serving.json"


class Family(StrEnum):
    """A model family and the diffusers pipeline it equals."""

    FLUX_INPAINT = "flux-inpaint"
    """`FluxInpaintPipeline`: any Flux text-to-image checkpoint; blends with the template after each step."""
    FLUX_FILL = "flux-fill"
    """`FluxFillPipeline`: conditioned on the masked picture; never blends."""


PIPELINE_FAMILIES = {
    "FluxPipeline": Family.FLUX_INPAINT,
    "FluxInpaintPipeline": Family.FLUX_INPAINT,
    "FluxImg2ImgPipeline": Family.FLUX_INPAINT,
    "FluxFillPipeline": Family.FLUX_FILL,
}
"""`_class_name` of a checkpoint's model_index.json → the family that edits with it."""


class ModelCard(BaseModel):
    """A served model: what the gateway validates against and the router matches."""

    model_config = ConfigDict(frozen=True, protected_namespaces=())

    name: str
    family: Family
    digest: str
    """sha-256 over configuration files and samples of the weight files."""
    vae_scale_factor: int
    """Pixels a latent pixel stands for, per side (8 for Flux)."""
    latent_channels: int
    max_text_tokens: int
    """Length to which prompts are padded, as diffusers' `max_sequence_length`."""
    takes_guidance: bool
    """Whether the transformer embeds a distilled guidance scale."""
    takes_true_cfg: bool
    default_steps: int
    default_guidance_scale: float
    default_strength: float
    native_size: int = NATIVE_SIZE
    """Pixels a side of the square pictures that the checkpoint was made for: `sample_size` of its autoencoder."""

    @property
    def pixel_multiple(self) -> int:
        """Sides of the model's picture are multiples of this: one token is 2x2 latent pixels."""
        return 2 * self.vae_scale_factor


class ServingDefaults(BaseModel):
    """``serving.json`` of a checkpoint, where it has one: what requests get that do not say. None: the family's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int | None = Field(None, ge=1)
    guidance_scale: float | None = Field(None, gt=0)
    strength: float | None = Field(None, gt=0, le=1)


def read_model_card(folder: Path, name: str | None = None) -> ModelCard:
    """The card of the checkpoint in `folder`.

    Args:
        folder: a diffusers checkpoint.
        name: how requests call it; default the folder's name.

    Raises:
        ValueError: not a diffusers folder, a family that is not served, or a `serving.json` that is not
            understood; says what is.
    """
    index = _read_json(folder / "model_index.json")
    pipeline = str(index.get("_class_name"))
    family = PIPELINE_FAMILIES.get(pipeline)
    if family is None:
        raise ValueError(f"{folder} holds a {pipeline}; served are: {', '.join(PIPELINE_FAMILIES)}")
    transformer = _read_json(folder / "transformer" / "config.json")
    vae = _read_json(folder / "vae" / "config.json")
    tokenizer = _read_json(folder / "tokenizer_2" / "tokenizer_config.json")
    missing = {"block_out_channels", "latent_channels"} - vae.keys()
    if missing:
        raise ValueError(f"{folder / 'vae'} is not an AutoencoderKL of diffusers: {sorted(missing)} missing")
    defaults = ServingDefaults() if not (folder / SERVING).exists() else _serving_defaults(folder / SERVING)
    fill = family is Family.FLUX_FILL
    distilled = bool(transformer.get("guidance_embeds", False))
    return ModelCard(
        name=name or folder.resolve().name,
        family=family,
        digest=digest(folder),
        vae_scale_factor=2 ** (len(vae["block_out_channels"]) - 1),
        latent_channels=int(vae["latent_channels"]),
        max_text_tokens=int(min(512, tokenizer.get("model_max_length", 512))),
        takes_guidance=distilled,
        takes_true_cfg=not fill,
        default_steps=defaults.steps or (50 if fill else 28 if distilled else 4),
        default_guidance_scale=defaults.guidance_scale or (30.0 if fill else 7.0),
        default_strength=defaults.strength or (1.0 if fill else 0.6),
        native_size=int(vae.get("sample_size", NATIVE_SIZE)),
    )


def _serving_defaults(path: Path) -> ServingDefaults:
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
