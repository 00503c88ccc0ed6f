"""A training run's state on disk: written whole or not at all, read without unpickling anything but tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings and containers of them); a kill at any moment leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The state in `path`, or None where no run was begun."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state
