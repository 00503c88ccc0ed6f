"""What the Python environment of each image holds.

The names come from what the Dockerfile installs, the versions from ``constraints.txt``: no image needs to be built.
What a distribution asks for is read from this environment, which has the same ones.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
OWN: Final = "giornata"
"""Begins the names of the distributions of this repository."""


@dataclass(frozen=True)
class ContainerImage:
    """What decides about the environment of an image."""

    service: str
    source: Path
    """The folder of its distribution."""
    extras: str
    """In brackets, or empty."""
    computes: bool
    """It has torch and what else is shared by services that compute."""


def images() -> list[ContainerImage]:
    """The images that Compose builds, each once: those for GPUs hold CUDA's libraries besides."""
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))["services"]
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    computing = set(re.findall(r"^FROM computing AS for-(\S+)$", dockerfile, re.MULTILINE))
    found: dict[str, ContainerImage] = {}
    for described in services.values():
        told = described.get("build", {}).get("args", {})
        name = told.get("SERVICE")
        extras = told.get("EXTRAS", "")
        extras = "" if extras.startswith("$") else extras  # those of images for GPUs
        if name and (extras or name not in found):
            source = ROOT / told.get("SOURCE", f"services/{name}")
            found[name] = ContainerImage(name, source, extras, name in computing)
    return list(found.values())


def requirements(image: ContainerImage) -> dict[str, str]:
    """Everything that the image's environment holds, by name, with its version; the repository's own is not among it.

    Raises:
        importlib.metadata.PackageNotFoundError: this environment lacks one: run `make setup`.
        KeyError: a name is not pinned.
    """
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    shared = re.findall(r'"\$\(echo /empty/giornata-\*\.whl\)(\[\w+\])"', dockerfile)
    computing = re.findall(
        r'install --constraint constraints\.txt "\$torch" ([\w ]+?) *\\$', dockerfile, re.MULTILINE
    )
    base = re.findall(r"^ARG PYTHON_IMAGE=python:(\d+\.\d+\.\d+)-", dockerfile, re.MULTILINE)
    if not len(shared) == len(computing) == len(base) == 1:
        raise ValueError(f"the Dockerfile installs otherwise than it did: {shared}, {computing}, {base}")
    name = _project(image.source)["name"]
    ahead = [Requirement(f"{OWN}{shared[0]}"), Requirement(f"{name}{image.extras}")]
    if image.computes:
        ahead += [Requirement(one) for one in ("torch", *computing[0].split())]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {canonicalize_name(pinned): version for pinned, version in pins.items()}
    return {found: pins[found] for found in sorted(_brought_in(ahead, base[0]))}


def _brought_in(ahead: Iterable[Requirement], python: str) -> set[str]:
    """The names of all that is brought in by what is asked for, in an image: Linux, and Python of this full version."""
    left, seen = list(ahead), set[tuple[str, str]]()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras} - {extra for one, extra in seen if one == name}:
            seen.add((name, extra))
            where = {
                "extra": extra,
                "sys_platform": "linux",
                "platform_system": "Linux",
                "python_version": python.rpartition(".")[0],
                "python_full_version": python,
            }
            left += [need for need in _asked_for(name) if not need.marker or need.marker.evaluate(where)]
    return {name for name, _ in seen if not name.startswith(OWN)}


def _asked_for(name: str) -> Iterator[Requirement]:
    """Return what a distribution asks for, with the extra in the marker."""
    yield from map(Requirement, metadata.requires(name) or [])


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    return project
