"""Files of the shared folder: ``<model>/<name>.safetensors`` is a LoRA of that model for every tenant."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

SUFFIX: Final = ".safetensors"
_PART: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}\Z")
"""A model's name as requests write it, and a LoRA's; no path leaves the folder by such parts."""


@dataclass(frozen=True)
class SharedPath:
    """What the place of a file says."""

    model: str
    name: str


def shared_path(folder: str, file: str) -> SharedPath | None:
    """What ``<folder>/<file>`` is; None where one of the two names is not accepted."""
    name = file.removesuffix(SUFFIX)
    if name == file or not _PART.match(folder) or not _PART.match(name):
        return None
    return SharedPath(folder, name)
