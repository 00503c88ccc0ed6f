"""The project's checkout, which a package that is installed in place lies in."""

from __future__ import annotations

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
"""The checkout's folder; what lies above the package where there is no checkout."""
TRAINED: Final = ROOT / "deploy" / "model" / "fresco"
"""The trained checkpoint that the checkout carries."""
ADAPTERS: Final = ROOT / "deploy" / "model" / "adapters"
"""The adapters of that checkpoint: LoRAs and ControlNets."""
SEGMENTER: Final = ROOT / "deploy" / "model" / "sinopia"
"""What finds the things in that checkpoint's scenes that words name."""
STATE: Final = ROOT / ".giornata"
"""What `giornata up` keeps."""
MODELS: Final = STATE / "models"
"""Checkpoints with random weights that were built here."""
PROFILE: Final = STATE / "profile.json"
"""Where `giornata profile` writes by default, and `giornata up` looks."""
LAB: Final = "giornata_lab"
"""What measures, trains, and builds models with random weights. It may not be installed: commands import it by name."""


def find() -> Path | None:
    """The checkout; None where the package is installed elsewhere."""
    return ROOT if (ROOT / "deploy" / "tools" / "pyproject.toml").is_file() else None
