"""What the campaign's parts import, and what of it a machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = tuple(
    str(ROOT / folder) for folder in (".", "shared", "services/denoiser", "services/prepost", "deploy/tools")
)
"""Where the project's own packages are, for a Python into which they are not installed."""

ENGINE: Final = {
    "click": "click",
    "diffusers": "diffusers",
    "huggingface_hub": "huggingface-hub",
    "matplotlib": "matplotlib",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "rich": "rich",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "structlog": "structlog",
    "torch": "torch",
    "transformers": "transformers",
}
"""Module → distribution, of every part."""
TESTS: Final = ENGINE | {
    "hypothesis": "hypothesis",
    "msgpack": "msgpack",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
}
NEEDS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "tests": TESTS,
        "tests_of_processes": TESTS,
        "pictures": ENGINE | {"PIL": "pillow", "skimage": "scikit-image"},
    }
)
"""Likewise, of parts that need more."""
WISHED: Final = {"triton": "triton"}
"""What the code uses where it is there."""


def found(module: str) -> bool:
    """Whether this Python has it."""
    return find_spec(module) is not None


def missing(part: str, has: Callable[[str], bool] = found) -> list[str]:
    """Distributions that a part cannot do without, and this Python has not."""
    return sorted(name for module, name in NEEDS.get(part, ENGINE).items() if not has(module))


def told(parts: Collection[str], has: Callable[[str], bool] = found) -> list[str]:
    """Sentences about what is missing; none where nothing is."""
    lacking = {part: names for part in parts if (names := missing(part, has))}
    sentences = [f"{part} will not run: {', '.join(names)} missing." for part, names in lacking.items()]
    if lacking:
        every = sorted({name for names in lacking.values() for name in names})
        sentences.append(f"To add them: python -m pip install --constraint constraints.txt {' '.join(every)}")
    absent = sorted(name for module, name in WISHED.items() if not has(module))
    return sentences + [f"{name} is missing: what it would speed up takes its slower way." for name in absent]
