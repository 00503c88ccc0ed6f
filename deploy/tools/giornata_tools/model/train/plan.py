"""What is to be trained, and where."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from giornata_tools.model.train.ranks import Ranks


@dataclass(frozen=True)
class StagePlan:
    """What is to be trained, and where."""

    folder: Path
    """State, sample grids and results."""
    steps: int
    """Steps in total, the ones before a restart included."""
    seed: int
    """Seed of weights, scenes and noise."""
    device: torch.device
    start: Path | None = None
    """A checkpoint whose weights are learnt on from, where `folder` holds no state; None for random ones."""
    ranks: Ranks = field(default_factory=Ranks)
    compiled: bool = False
    """Fuse the transformer's operations, one compilation a size: pays for itself within some hundred steps."""
