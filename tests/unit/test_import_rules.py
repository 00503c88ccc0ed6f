"""Who may import what: services apart, torch only where tensors are computed, pure folders free of IO and clocks.

A folder is *pure* where the docstring of its package ends with "Pure.": no module below it, nor any module of this
project that such a module imports, touches what `ACTING` lists.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.unit.imports import imported

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "giornata": ROOT / "shared",
    "giornata_gateway": ROOT / "services" / "gateway",
    "giornata_router": ROOT / "services" / "router",
    "giornata_denoiser": ROOT / "services" / "denoiser",
    "giornata_prepost": ROOT / "services" / "prepost",
    "giornata_controlnet": ROOT / "services" / "controlnet",
    "giornata_lora_store": ROOT / "services" / "lora-store",
    "giornata_tools": ROOT / "deploy" / "tools",
    "giornata_lab": ROOT / "deploy" / "lab",
}
TOOLS, LAB = "giornata_tools", "giornata_lab"
ABOVE = {TOOLS: PACKAGES.keys() - {LAB}, LAB: PACKAGES.keys()}
"""What these may import: the tools start the services, the lab measures all of it; no service imports them, and nothing
imports the lab."""

ACTING = {
    "aiohttp",
    "asyncio",
    "logging",
    "multiprocessing",
    "nats",
    "obstore",
    "os",
    "redis",
    "structlog",
    "subprocess",
    "threading",
    "time",
}

WITHOUT_TORCH = ("giornata_gateway", "giornata_router", "giornata_lora_store")
"""Their environments hold no torch."""

COMPUTING = {"accelerate", "diffusers", "numpy", "safetensors", "scipy", "torch", "transformers"}
ALLOWED = {"giornata_router": {"numpy", "scipy"}, "giornata_lora_store": {"numpy", "safetensors"}}
"""The router fits step times to telemetry, a few features and samples at a time. The LoRA store reads headers."""


def _modules() -> dict[str, Path]:
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        for path in (folder / package).rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@cache
def _imports(module: str) -> frozenset[str]:
    """Dotted names that `module` imports anywhere in its source, and the packages that run with them."""
    named = _named(module)
    return frozenset(named | {parent for name in named | {module} for parent in _parents(name)})


@cache
def _named(module: str) -> set[str]:
    named: set[str] = set()
    for name, taken in imported(MODULES[module]).items():
        named |= {name} | ({f"{name}.{each}" for each in taken} & MODULES.keys())
    return named


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _ways_to(roots: set[str]) -> dict[str, str]:
    """Modules of this project that reach one of `roots` when they are imported → a shortest way there."""
    importers: dict[str, list[str]] = {}
    for module in MODULES:
        for name in _imports(module):
            importers.setdefault(name, []).append(module)
    ways = {name: name for name in roots}
    ahead = deque(roots)
    while ahead:
        name = ahead.popleft()
        for module in importers.get(name, ()):
            if module not in ways:
                ways[module] = f"{module} → {ways[name]}"
                ahead.append(module)
    return {module: way for module, way in ways.items() if module in MODULES}


def _package(module: str) -> str:
    return module.partition(".")[0]


def _says_pure(module: str) -> bool:
    path = MODULES[module]
    if path.name != "__init__.py":
        return False
    return "Pure." in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "")


PURE_FOLDERS = sorted(name for name in MODULES if _says_pure(name))
PURE = sorted(name for name in MODULES if any(f"{name}.".startswith(f"{folder}.") for folder in PURE_FOLDERS))


def test_pure_modules_reach_nothing_that_acts() -> None:
    assert len(PURE) > 50
    assert [way for module, way in _ways_to(ACTING).items() if module in PURE] == []


def test_a_module_imports_its_own_package_and_the_shared_one_alone() -> None:
    for module in MODULES:
        own = {_package(module), "giornata", *ABOVE.get(_package(module), ())}
        strange = {name for name in _imports(module) if _package(name) in PACKAGES.keys() - own}
        assert strange == set(), module


def test_imports_run_from_main_to_service_to_the_rest_and_never_back() -> None:
    for module in (name for name in MODULES if _package(name) not in ABOVE):
        package, _, name = module.partition(".")
        above = {f"{package}.__main__"} | ({f"{package}.service"} if name != "__main__" else set())
        assert _imports(module) & above == set(), module


def test_no_module_imports_the_tests() -> None:
    assert [module for module in MODULES if any(_package(name) == "tests" for name in _named(module))] == []


def _folder(module: str) -> str:
    """The folder that a module lies in; a package is in itself."""
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def _folders(package: str) -> Mapping[str, set[str]]:
    """Folder → the folders that its modules import from; a package's root holds what starts it and has no floor."""
    graph: dict[str, set[str]] = {}
    for module in (name for name in MODULES if _package(name) == package):
        folder = _folder(module)
        targets = {_folder(name) for name in _named(module) if name in MODULES and _package(name) == package}
        if folder != package:
            graph.setdefault(folder, set()).update(targets - {folder, package})
    return graph


@pytest.mark.parametrize("package", PACKAGES)
def test_folders_import_each_other_in_one_direction(package: str) -> None:
    try:
        TopologicalSorter(_folders(package)).prepare()
    except CycleError as error:
        pytest.fail(f"folders import each other: {' → '.join(error.args[1])}")


def _forbidden(package: str) -> set[str]:
    return COMPUTING - ALLOWED.get(package, set())


def test_a_service_without_torch_names_nothing_that_computes() -> None:
    for package in WITHOUT_TORCH:
        ways = _ways_to(_forbidden(package))
        assert [way for module, way in ways.items() if _package(module) == package] == []


LATER = {"diffusers", "peft", "scipy.ndimage", "scipy.optimize", "torch._dynamo", "transformers"}
"""Take seconds to load: what a checkpoint needs of them comes with the checkpoint."""
CHOSEN = {
    name
    for name in MODULES
    if name.startswith(
        (
            *(f"giornata_denoiser.families.{family}." for family in ("driven", "flux", "unet")),
            *(f"giornata.control.{kind}" for kind in ("flux", "sd3", "unet")),
            "giornata_prepost.families.",
        )
    )
}
"""Modules of families, of which a checkpoint chooses one."""

STARTED = """
import importlib, json, runpy, sys
sys.argv = ["service", "--telemetry-hz", "often"]
told = []
for package in {light} + {computing}:
    try:
        runpy.run_module(package, run_name="__main__")
    except SystemExit as end:
        told.append(end.code)
loaded = [list(sys.modules)]
for packages in {light}, {computing}:
    for package in packages:
        importlib.import_module(package + ".service")
    loaded.append(list(sys.modules))
json.dump([told, *loaded], sys.stdout)
"""
SERVICES = sorted(name for name in PACKAGES if name not in {"giornata", *ABOVE})


@pytest.mark.slow
def test_services_tell_mistakes_at_once_and_load_nothing_before_they_need_it() -> None:
    """Those with torch after the others, in one process: what one loads is loaded."""
    light, computing = [[name for name in SERVICES if (name in WITHOUT_TORCH) is it] for it in (True, False)]
    code = STARTED.format(light=light, computing=computing)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    told, first, without_torch, all_of_them = json.loads(ended.stdout)
    assert (told, ended.stderr.count("TELEMETRY_HZ")) == ([2] * len(SERVICES), len(SERVICES))
    assert {"torch", *LATER} & set(first) == set()
    assert set.intersection(*map(_forbidden, light)) & set(without_torch) == set()
    assert (LATER | CHOSEN) & set(all_of_them) == set()
