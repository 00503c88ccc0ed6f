"""The provenance of a report: the machine, and versions of distributions."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib import metadata


def installed(name: str) -> str | None:
    """The version of a distribution in this environment, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def lacking(name: str, extra: str = "") -> list[str]:
    """Names of what an installed distribution, or its `extra`, requires and is not installed."""
    parts = (item.partition("extra == ") for item in metadata.requires(name) or ())
    needed = (re.split(r"[^\w.-]", item)[0] for item, _, belongs in parts if belongs.strip("\"'") == extra)
    return [required for required in needed if installed(required) is None]


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name; "not installed" where there is none."""
    return {name: installed(name) or "not installed" for name in names}


def machine() -> dict[str, str | int]:
    """This machine."""
    return {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count() or 0}
