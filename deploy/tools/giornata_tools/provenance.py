"""The distributions of this environment: their versions, and what is lacking."""

from __future__ import annotations

import re
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
