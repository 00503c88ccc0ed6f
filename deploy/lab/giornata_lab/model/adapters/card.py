"""The card of an adapter that ships: what it is, how it was trained, and what was measured of it."""

from __future__ import annotations

import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from giornata_tools.checkout import ADAPTERS

FOLDER: Final = ADAPTERS
"""Where the adapters of fresco ship."""
LORAS: Final = FOLDER / "loras" / "fresco"
"""`loras` is a shared folder of the LoRA store: `<model>/<name>.safetensors`."""
CONTROLNETS: Final = FOLDER / "controlnets"
WEIGHTS: Final = "diffusion_pytorch_model.safetensors"
"""diffusers' name for a network's weights."""


class AdapterKind(StrEnum):
    """What an adapter is."""

    LORA = "lora"
    CONTROLNET = "controlnet"


class AdapterCard(BaseModel):
    """How one adapter came to be, and what it does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: AdapterKind
    does: str
    base_digest: str
    """12 hex digits of the sha-256 over the weights of transformer and text encoders that it was trained for."""
    command: str
    seed: int
    steps: int
    sha256: str
    """sha-256 of the weights' file."""
    size_bytes: int
    """Size of the weights' file."""
    measured: dict[str, float] = {}
    """Figures of held-out edits; `python -m giornata_lab.model.adapters` writes them."""

    @property
    def file(self) -> Path:
        """The weights, where they ship."""
        if self.kind is AdapterKind.LORA:
            return LORAS / f"{self.name}.safetensors"
        return CONTROLNETS / self.name / WEIGHTS

    def write(self, folder: Path = FOLDER) -> None:
        """Put the card where `read` finds it."""
        path = card_path(self.name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def card_path(name: str, folder: Path = FOLDER) -> Path:
    """The file of a card."""
    return folder / "cards" / f"{name}.json"


def read(name: str, folder: Path = FOLDER) -> AdapterCard:
    """The card of the adapter `name`."""
    return AdapterCard.model_validate_json(card_path(name, folder).read_bytes())


def sha256_of(path: Path) -> str:
    """64 hex digits over a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
