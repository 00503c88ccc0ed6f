"""What a built image holds, as the engine and the image itself tell it."""

from __future__ import annotations

import json
from typing import Final

from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.lab.compose.engine import Engine

OWN_LAYER: Final = "COPY /new /"
"""Begins the Dockerfile's command that adds what an image shares with no other."""
LISTING: Final = """
import json
from importlib import metadata
print(json.dumps([(one.name, one.version) for one in metadata.distributions()]))
"""


def size(engine: Engine, image: str) -> int:
    """Bytes of an image, with all its layers."""
    return int(engine.docker("image", "inspect", "--format", "{{.Size}}", image))


def own_size(engine: Engine, image: str) -> int:
    """Bytes of the layer that no other image has."""
    history = engine.docker(
        "history", "--no-trunc", "--human=false", "--format", "{{.Size}} {{.CreatedBy}}", image
    )
    [found] = [line.split()[0] for line in history.splitlines() if OWN_LAYER in line]
    return int(found)


def run_inside(engine: Engine, image: str, *command: str) -> str:
    """What a program of the image writes, run by root in a container of its own."""
    entrypoint, *arguments = command
    return engine.docker("run", "--rm", "--user", "0", "--entrypoint", entrypoint, image, *arguments)


def distributions(engine: Engine, image: str) -> list[tuple[str, str]]:
    """Name and version of each Python distribution that the image's Python sees, sorted.

    Names are normalised. Versions are without the label of a build: torch 2.13.0+cpu is 2.13.0.
    """
    told = json.loads(run_inside(engine, image, "python", "-c", LISTING))
    return sorted((canonicalize_name(name), Version(version).public) for name, version in told)
