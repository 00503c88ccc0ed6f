"""How ControlNets are configured: the same at denoisers and at the ControlNet service. Pure."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


def named(configured: str) -> dict[str, str]:
    """Checkpoints by name, of ``NAME=CHECKPOINT,NAME=CHECKPOINT``; a checkpoint alone is called as its folder.

    ValueError where a name is given twice, or is none.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in configured.split(","))):
        name, equals, checkpoint = entry.partition("=")
        if not equals:
            name, checkpoint = Path(entry).resolve().name, entry
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a ControlNet: letters, digits, _ . -")
        if name in found:
            raise ValueError(f"two ControlNets are called {name}")
        found[name] = checkpoint
    return found
