"""How an operator sets what the Compose file does not name: the page's two files, and what they meet."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.unit.deploy.overlays import CONFIGS, compose, shared_settings
from tests.unit.deploy.test_compose import DEPLOY, VARIANTS, service_of

PAGE = (DEPLOY.parent / "docs" / "deploy.md").read_text()
VARIABLE = "GIORNATA_ENV_FILE"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return compose()


def block(kind: str) -> str:
    """The first block of a kind in the page's section."""
    section = PAGE.split("\n### Any other variable\n", 1)[1]
    found = re.search(rf"^```{kind}\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("variant", [*VARIANTS, "profiler"])
def test_every_service_is_told_what_the_operators_file_holds(services: dict[str, Any], variant: str) -> None:
    *own, told = services[variant]["env_file"]
    assert told == f"${{{VARIABLE}:-/dev/null}}", "Compose wants a file in any case"
    assert bool(own) == (service_of(variant) == "prepost"), "what the operator says comes last, and wins"


def test_the_pages_file_holds_variables_that_reach_a_service(services: dict[str, Any]) -> None:
    """What `environment` names wins over the file: a line with such a name would do nothing by itself."""
    lines = dict(line.split("=", 1) for line in block("ini").splitlines())
    assert lines.pop(VARIABLE) == ".env", "relative to the folder of compose.yaml, where Compose looks for it"
    assert lines
    for name, value in lines.items():
        field = name.removeprefix("GIORNATA_").lower()
        readers = {service for service, kind in CONFIGS.items() if field in kind.model_fields}
        assert readers, name
        for variant in (one for one in VARIANTS if service_of(one) in readers):
            assert name not in services[variant]["environment"]
        for service in readers:
            kind = CONFIGS[service]
            kind.__pydantic_validator__.validate_assignment(kind.model_construct(), field, value)


def test_the_pages_override_sets_variables_that_its_services_read(services: dict[str, Any]) -> None:
    override = yaml.safe_load(block("yaml"))["services"]
    assert override
    for name, told in override.items():
        assert told.keys() == {"environment", "volumes"}
        folders = {mount.rpartition(":")[2] for mount in told["volumes"]}
        for variable, value in told["environment"].items():
            assert variable.removeprefix("GIORNATA_").lower() in CONFIGS[service_of(name)].model_fields
            assert value in folders
            assert variable not in services[name]["environment"]


def test_variables_of_the_pages_are_read_by_a_service_or_named_by_compose() -> None:
    """So that the file of variables is all that an operator needs."""
    named = {
        name
        for page in ("slow-edits.md", "scale.md", "secure.md", "api-http.md")
        for name in re.findall(r"`(GIORNATA_\w+[A-Z])", (DEPLOY.parent / "docs" / page).read_text())
    }
    assert named
    head = (DEPLOY / "compose.yaml").read_text()
    read = {f"GIORNATA_{name.upper()}" for name in shared_settings()}
    assert {name for name in named if name not in head} <= read
