"""Who may import what: services apart, torch only where tensors are computed, decisions free of IO and clocks.

Everything follows from the tables below. A module is *edge* where it acts, and *pure* otherwise: neither it nor any
module of this project that it imports may touch what `ACTING` lists.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PACKAGES = {
    "giornata": ROOT / "shared",
    "giornata_gateway": ROOT / "services" / "gateway",
    "giornata_router": ROOT / "services" / "router",
    "giornata_denoiser": ROOT / "services" / "denoiser",
    "giornata_prepost": ROOT / "services" / "prepost",
    "giornata_controlnet": ROOT / "services" / "controlnet",
    "giornata_lora_store": ROOT / "services" / "lora-store",
}

EDGE = {
    "giornata": {
        "blobs",
        "blobs.memory",
        "blobs.protocol",
        "blobs.redis",
        "bus",
        "cli.bench",
        "cli.bench_baseline",
        "cli.bench_plan",
        "cli.bench_run",
        "cli.bench_serve",
        "cli.checks.accelerator",
        "cli.checks.machine",
        "cli.checks.servers",
        "cli.doctor",
        "cli.edit",
        "cli.handing_over",
        "cli.http_door",
        "cli.interrupts",
        "cli.keys",
        "cli.keys_file",
        "cli.nats_door",
        "cli.profile",
        "cli.quarantine",
        "cli.status",
        "cli.up",
        "client",
        "client.connection",
        "client.edit",
        "deadlines",
        "loadgen.balancing",
        "loadgen.driver",
        "loadgen.images_api",
        "nats_connection",
        "patience",
        "probe",
        "quarantine",
        "records",
        "runtime",
        "streams",
        "telemetry",
        "template_records",
    },
    "giornata_gateway": {
        "__main__",
        "departure",
        "feed",
        "fleet_watch",
        "gateway",
        "http_app",
        "http_body",
        "http_edits",
        "http_errors",
        "http_fleet",
        "http_jobs",
        "http_status",
        "http_stream",
        "http_studio",
        "http_templates",
        "key_file",
        "memory",
        "multipart",
        "nats_door",
        "preparation",
        "quotas",
        "service",
        "registration",
        "sharing",
        "submission",
        "waiting",
    },
    "giornata_router": {
        "__main__",
        "computing",
        "dispatch",
        "lease",
        "ledger",
        "progress",
        "questions",
        "queue",
        "service",
        "stages",
        "templating",
        "tools",
        "walk",
    },
    "giornata_denoiser": {
        "__main__",
        "carrying",
        "inputs",
        "loop",
        "outcomes",
        "profiling.__main__",
        "reuse.accelerator",
        "registered",
        "reuse.files",
        "reuse.loader",
        "reuse.store",
        "service",
        "templating",
        "trace",
        "tuning",
    },
    "giornata_prepost": {
        "__main__",
        "model_thread",
        "pool",
        "service",
    },
    "giornata_controlnet": {"__main__", "service"},
    "giornata_lora_store": {"__main__", "service"},
}
"""Modules that act. Everything else is pure."""

ACTING = {
    "aiohttp",
    "asyncio",
    "logging",
    "multiprocessing",
    "nats",
    "os",
    "redis",
    "structlog",
    "subprocess",
    "threading",
    "time",
}

LOAD_GENERATORS_OWN = {"PIL", "aiohttp", "click", "numpy", "rich"}
"""What `giornata.loadgen` and the command line import and services may lack: the extra ``cli``."""

WITHOUT_TORCH = ("giornata_gateway", "giornata_router", "giornata_lora_store", "giornata_controlnet")
"""Their environments hold no torch; the ControlNet service joins the others when it computes residuals."""

COMPUTING = {"accelerate", "diffusers", "numpy", "safetensors", "scipy", "torch", "transformers"}
REGRESSIONS = {"numpy", "scipy"}
"""The router fits step times to telemetry, a few features and samples at a time."""


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
    named: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} uses a relative import; the whole name is searchable"
            assert node.module is not None
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= {node.module} | (members & MODULES.keys())
    return frozenset(named | {parent for name in named | {module} for parent in _parents(name)})


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _reach(module: str) -> dict[str, tuple[str, ...]]:
    """Every name that importing `module` reaches through this project → the way there."""
    ways: dict[str, tuple[str, ...]] = {}
    ahead: list[tuple[str, tuple[str, ...]]] = [(module, (module,))]
    while ahead:
        name, way = ahead.pop()
        for imported in _imports(name) - ways.keys():
            ways[imported] = (*way, imported)
            if imported in MODULES:
                ahead.append((imported, ways[imported]))
    return ways


def _package(module: str) -> str:
    return module.partition(".")[0]


def _in_package(module: str) -> str:
    return module.partition(".")[2]


def _ways_to(module: str, roots: set[str]) -> list[str]:
    return sorted(" → ".join(way) for name, way in _reach(module).items() if name in roots)


PURE = sorted(name for name in MODULES if _in_package(name) not in EDGE[_package(name)])
EDGE_MODULES = sorted(f"{package}.{name}" for package, names in EDGE.items() for name in names)


@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_reaches_nothing_that_acts(module: str) -> None:
    assert _ways_to(module, ACTING) == []


@pytest.mark.parametrize("module", EDGE_MODULES)
def test_an_edge_module_exists_and_acts(module: str) -> None:
    assert module in MODULES, f"{module} is in this test's table and nowhere else"
    assert _ways_to(module, ACTING) != [], f"{module} is pure: take it out of this test's table"


@pytest.mark.parametrize("module", sorted(MODULES))
def test_a_module_imports_its_own_package_and_the_shared_one_alone(module: str) -> None:
    foreign = PACKAGES.keys() - {_package(module), "giornata"}
    assert {name for name in _imports(module) if _package(name) in foreign} == set()


@pytest.mark.parametrize("module", sorted(name for name in MODULES if not name.startswith("giornata.cli")))
def test_only_the_command_line_imports_itself(module: str) -> None:
    assert {name for name in _imports(module) if name.startswith("giornata.cli")} == set(), (
        "services lack its extra"
    )


@pytest.mark.parametrize(
    "module", sorted(name for name in MODULES if not name.startswith(("giornata.cli", "giornata.loadgen")))
)
def test_of_the_load_generator_services_import_what_needs_no_extra(module: str) -> None:
    taken = {name for name in _imports(module) if name.startswith("giornata.loadgen.")}
    assert [way for name in taken for way in _ways_to(name, LOAD_GENERATORS_OWN)] == []


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_from_main_to_service_to_pure_and_never_back(module: str) -> None:
    package, name = _package(module), _in_package(module)
    above = {f"{package}.__main__"} | ({f"{package}.service"} if name != "__main__" else set())
    assert _imports(module) & above == set()


def _forbidden(package: str) -> set[str]:
    return COMPUTING - REGRESSIONS if package == "giornata_router" else COMPUTING


@pytest.mark.parametrize("module", sorted(name for name in MODULES if _package(name) in WITHOUT_TORCH))
def test_a_service_without_torch_names_nothing_that_computes(module: str) -> None:
    assert _ways_to(module, _forbidden(_package(module))) == []


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_a_service_without_torch_loads_nothing_that_computes(package: str) -> None:
    code = f"import sys, {package}.__main__; print(*sorted({_forbidden(package)!r} & sys.modules.keys()))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (loaded.returncode, loaded.stdout.split()) == (0, []), loaded.stderr
