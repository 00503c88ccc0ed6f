"""The provenance of a report: the machine, and versions of distributions."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable

from giornata_tools.cli.extras import installed


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions by name; "not installed" where there is none."""
    return {name: installed(name) or "not installed" for name in names}


def machine() -> dict[str, str | int]:
    """This machine."""
    return {"platform": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count() or 0}
