"""What a report says of how it was made: the machine, and versions of installed distributions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from importlib import metadata


def installed(name: str) -> str | None:
    """The version of a distribution in this environment, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name; "not installed" where there is none."""
    return {name: installed(name) or "not installed" for name in names}


def machine() -> dict[str, str | int]:
    """This machine."""
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "cpus": os.cpu_count() or 0,
    }
