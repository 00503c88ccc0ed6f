"""Python and what is installed in its environment."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final

from giornata_tools.cli.doctor.finding import Finding, fail, ok
from giornata_tools.provenance import installed

OLDEST: Final = (3, 11)
SETUP: Final = "Run `make setup` in the checkout."

Version = Callable[[str], str | None]
"""The installed version of a distribution, or None."""
Needs = Callable[[str], Iterable[str]]
"""The requirements of an installed distribution."""


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """The interpreter is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST:
        return fail(
            "Python",
            f"{shown} is older than {OLDEST[0]}.{OLDEST[1]}.",
            "Make the environment with a newer one: make setup PYTHON=python3.12",
        )
    return ok("Python", f"{shown}, {sys.executable}")


def needs(name: str) -> list[str]:
    """What an installed distribution requires, as it says it."""
    return metadata.requires(name) or []


def wanted(root: Path) -> dict[str, str]:
    """Name → version of the distributions of the checkout `root`."""
    places = ("shared", "deploy/tools", "services/*")
    files = [file for place in places for file in sorted(root.glob(f"{place}/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project["version"] for project in projects}


def distributions(want: Mapping[str, str], version: Version = installed) -> Finding:
    """Giornata's own distributions are there, in the versions of the checkout."""
    have = {name: version(name) for name in want}
    missing = [name for name, found in have.items() if found is None]
    wrong = {name: found for name, found in have.items() if found is not None and found != want[name]}
    other = [f"{name} {found} instead of {want[name]}" for name, found in wrong.items()]
    if missing or other:
        parts = [*(f"{name} is not installed" for name in missing), *other]
        return fail("Distributions", "; ".join(parts) + ".", SETUP)
    return ok(
        "Distributions",
        f"{len(want)} of {len(want)} installed, version {', '.join(sorted(set(want.values())))}",
    )


def requirements(names: Iterable[str], version: Version = installed, of: Needs = needs) -> Finding:
    """What the installed ones of `names` require is installed too."""
    there = [name for name in names if version(name) is not None]
    lacking = {
        required
        for name in there
        for item in of(name)
        if (required := _required(item)) is not None and version(required) is None
    }
    if lacking:
        return fail("Packages", f"Not installed: {', '.join(sorted(lacking))}.", SETUP)
    return ok("Packages", f"everything that {len(there)} distributions require is installed")


def _required(item: str) -> str | None:
    """The name in a requirement; None where it belongs to an extra."""
    name, _, marker = item.partition(";")
    found = re.match(r"[A-Za-z0-9._-]+", name)
    return None if found is None or "extra ==" in marker else found[0]
