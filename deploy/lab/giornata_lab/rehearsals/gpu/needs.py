"""What the campaign's parts import, and what of it a machine lacks. The standard library alone is imported here."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Final

ROOT: Final = Path(__file__).parents[5]
FOLDERS: Final = tuple(
    str(ROOT / folder)
    for folder in (".", "shared", "services/denoiser", "services/prepost", "deploy/tools", "deploy/lab")
)
"""Where the project's own packages are, for a Python into which they are not installed."""

ENGINE: Final = {
    "click": "click",
    "diffusers": "diffusers",
    "huggingface_hub": "huggingface-hub",
    "matplotlib": "matplotlib",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "pydantic": "pydantic",
    "pydantic_settings": "pydantic-settings",
    "rich": "rich",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "structlog": "structlog",
    "torch": "torch",
    "transformers": "transformers",
    "uvloop": "uvloop",
}
"""Module → distribution, of every part."""
TESTS: Final = ENGINE | {
    "hypothesis": "hypothesis",
    "pytest": "pytest",
    "xdist": "pytest-xdist",
}
NEEDS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "oracles": TESTS,
        "tests": TESTS,
        "tests_of_processes": TESTS,
        "launches": ENGINE | {"triton": "triton"},  # it counts what a GPU would launch
        "pictures": ENGINE
        | {"PIL": "pillow", "nats": "nats-py", "skimage": "scikit-image", "tenacity": "tenacity"},
    }
)
"""Likewise, of parts that need more."""
WISHED: Final = {"triton": "triton"}
"""What the code uses where it is there."""
BROUGHT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "anyio": "idna typing-extensions",
        "diffusers": "filelock huggingface-hub importlib-metadata numpy pillow regex requests safetensors",
        "httpcore2": "h11 truststore",
        "httpx2": "anyio httpcore2 idna truststore",
        "huggingface-hub": "click filelock fsspec hf-xet httpx2 packaging pyyaml tqdm typing-extensions",
        "hypothesis": "sortedcontainers",
        "imageio": "numpy pillow",
        "importlib-metadata": "lazy-importer zipp",
        "markdown-it-py": "mdurl",
        "matplotlib": "contourpy cycler fonttools kiwisolver numpy packaging pillow pyparsing python-dateutil",
        "pydantic": "annotated-types pydantic-core typing-extensions typing-inspection",
        "pydantic-core": "typing-extensions",
        "pydantic-settings": "pydantic python-dotenv typing-extensions typing-inspection",
        "pytest": "iniconfig packaging pluggy pygments",
        "pytest-xdist": "execnet pytest",
        "requests": "certifi charset-normalizer idna urllib3",
        "rich": "markdown-it-py pygments",
        "scikit-image": "imageio lazy-loader networkx numpy packaging pillow scipy tifffile",
        "tokenizers": "huggingface-hub",
        "transformers": "huggingface-hub numpy packaging pyyaml regex safetensors tokenizers tqdm typer",
        "typer": "pydantic rich",
    }
)
"""What the pinned distributions import of others. One that a machine has in another version may need less."""
MODULES: Final = {name: module for needs in (TESTS, *NEEDS.values()) for module, name in needs.items()} | {
    "fonttools": "fontTools",
    "markdown-it-py": "markdown_it",
    "python-dateutil": "dateutil",
    "python-dotenv": "dotenv",
    "pyyaml": "yaml",
}
"""The module of a distribution, where it is called otherwise."""
LEAST: Final = {"typing-extensions": (4, 16)}
"""Versions below which the pinned distributions cannot be imported."""
TORCH: Final = "torch"


def found(module: str) -> bool:
    """Return whether this Python has it."""
    return find_spec(module) is not None


def missing(part: str, has: Callable[[str], bool] = found) -> list[str]:
    """Distributions that a part cannot do without, and this Python has not: all of them, as deep as they import."""
    seen: set[str] = set()
    todo, lacking = list(NEEDS.get(part, ENGINE).values()), []
    while todo:
        if (name := todo.pop()) in seen:
            continue
        seen.add(name)
        if not has(MODULES.get(name, name.replace("-", "_"))):
            lacking.append(name)
            todo += BROUGHT.get(name, "").split()
        elif name != TORCH:
            if name in LEAST and _is_older(name, LEAST[name]):
                lacking.append(name)
            todo += set(BROUGHT.get(name, "").split()).intersection(_required(name))
    return sorted(lacking)


def told(parts: Collection[str], has: Callable[[str], bool] = found) -> list[str]:
    """Sentences about what is missing; none where nothing is."""
    lacking = {part: names for part in parts if (names := missing(part, has))}
    alike: dict[tuple[str, ...], list[str]] = {}
    for part, names in lacking.items():
        alike.setdefault(tuple(names), []).append(part)
    sentences = [f"{', '.join(of)} will not run: {', '.join(names)} missing." for names, of in alike.items()]
    if lacking:
        every = sorted({name for names in lacking.values() for name in names})
        sentences.append(
            f"To add them: python -m pip install --constraint constraints.txt {' '.join(every)}; without a network "
            "collect them where there is one by `make gpu-wheels`, bring the folder .whl, and run "
            '`make gpu ARGS="--wheels .whl"`. What is missing even then, `make gpu-wheels ARGS=--all` collects too.'
        )
    absent = sorted(name for module, name in WISHED.items() if not has(module))
    return sentences + [f"{name} is missing: what it would speed up takes its slower way." for name in absent]


def _required(name: str) -> Iterator[str]:
    """Return what an installed distribution says that it needs, somewhere at least."""
    try:
        lines = requires(name) or ()
    except PackageNotFoundError:
        return
    for line in lines:
        if (match := re.match(r"[A-Za-z0-9._-]+", line)) is not None:
            yield re.sub(r"[-_.]+", "-", match[0]).lower()


def _is_older(name: str, least: tuple[int, ...]) -> bool:
    try:
        numbers = re.findall(r"\d+", version(name))[: len(least)]
    except PackageNotFoundError:
        return False
    return tuple(map(int, numbers)) < least
