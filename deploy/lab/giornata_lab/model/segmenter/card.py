"""The card of the segmenter that ships: how it was trained, and what was measured of it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from giornata_tools.checkout import SEGMENTER

CARD: Final = "card.json"
WEIGHTS: Final = "model.safetensors"
"""transformers' name for a model's weights."""


class SegmenterCard(BaseModel):
    """How the segmenter came to be, and how well it finds what it is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    command: str
    seed: int
    steps: int
    sha256: str
    """sha-256 of the weights' file."""
    size_bytes: int
    """Size of the weights' file."""
    measured: dict[int, dict[str, float]] = {}
    """Side of the pictures in pixels → figures of held-out scenes; `python -m giornata_lab.model.segmenter` writes
    them."""

    def write(self, folder: Path = SEGMENTER) -> None:
        """Put the card where `read` finds it."""
        (folder / CARD).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read(folder: Path = SEGMENTER) -> SegmenterCard:
    """The card of the segmenter in `folder`."""
    return SegmenterCard.model_validate_json((folder / CARD).read_bytes())
