"""Python and what is installed in its environment."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from giornata_tools.cli.doctor.finding import SETUP, Finding, fail, ok
from giornata_tools.provenance import installed, lacking

OLDEST: Final = (3, 11)


def python(version: tuple[int, int, int] = sys.version_info[:3]) -> Finding:
    """The interpreter is new enough."""
    shown = ".".join(map(str, version))
    if version[:2] < OLDEST:
        return fail(
            f"{shown} is older than {OLDEST[0]}.{OLDEST[1]}.",
            "Make the environment with a newer one: make setup PYTHON=python3.12",
        )
    return ok(f"{shown}, {sys.executable}")


def wanted(root: Path) -> dict[str, str]:
    """Name → version of the distributions of the checkout `root`."""
    places = ("shared", "deploy/tools", "services/*")
    files = [file for place in places for file in sorted(root.glob(f"{place}/pyproject.toml"))]
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return {project["name"]: project["version"] for project in projects}


def distributions(want: Mapping[str, str]) -> Finding:
    """Giornata's own distributions are there, in the versions of the checkout."""
    have = {name: installed(name) for name in want}
    missing = [f"{name} is not installed" for name, found in have.items() if found is None]
    wrong = {name: found for name, found in have.items() if found is not None and found != want[name]}
    other = [f"{name} {found} instead of {want[name]}" for name, found in wrong.items()]
    if missing or other:
        return fail("; ".join([*missing, *other]) + ".", SETUP)
    return ok(f"{len(want)} of {len(want)} installed, version {', '.join(sorted(set(want.values())))}")


def requirements(names: Iterable[str]) -> Finding:
    """What the installed ones of `names` require is installed too."""
    there = [name for name in names if installed(name) is not None]
    absent = sorted({required for name in there for required in lacking(name)})
    if absent:
        return fail(f"Not installed: {', '.join(absent)}.", SETUP)
    return ok(f"everything that {len(there)} distributions require is installed")
