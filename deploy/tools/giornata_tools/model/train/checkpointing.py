"""A training run's state on disk: written whole or not at all, read without unpickling anything but tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn


class Unusable(Exception):
    """A state on disk that the stage at hand cannot go on from, or build on."""


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


def digest(module: nn.Module) -> str:
    """12 hex digits of the sha-256 over a module's weights."""
    total = hashlib.sha256()
    for name, weights in sorted(module.state_dict().items()):
        total.update(name.encode() + b"\0" + weights.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:12]
