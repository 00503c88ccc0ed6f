"""Variables of the Compose file: those that it does not name, and those by which services share GPUs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from giornata_denoiser.config import DenoiserConfig
from tests.unit.deploy.overlays import CONFIGS, compose, shared_settings
from tests.unit.deploy.test_compose import DEPLOY, SECOND, VARIANTS, service_of

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


def test_denoisers_of_a_model_claim_a_gpu_each_in_memory_that_they_share() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for variant in ("denoiser", "denoiser-gpu"):
        service = compose["services"][variant]
        folder = service["environment"]["GIORNATA_DEVICE_CLAIMS"]
        config = DenoiserConfig.model_validate({"model": "m", "device_claims": folder})
        assert config.gpus_wanted == 1
        assert f"devices:{folder}" in service["volumes"]
    assert compose["volumes"]["devices"]["driver_opts"]["type"] == "tmpfs", (
        "NFS would lock for other hosts, too"
    )
    for variant in SECOND:
        assert "GIORNATA_DEVICE_CLAIMS" not in compose["services"][variant]["environment"], (
            "it shares SECOND_GPU with its prepost, and with whoever is there"
        )


def test_services_on_gpus_state_what_they_need_where_all_see_it() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    computing = [name for name in services if name.startswith(("denoiser", "prepost", "controlnet"))]
    on_gpus = [name for name in computing if name.endswith("-gpu")]
    assert len(on_gpus) == 5
    for name in computing:
        folder = services[name]["environment"].get("GIORNATA_DEVICE_LEDGER")
        assert folder == ("/devices" if name in on_gpus else None)
        assert folder is None or f"devices:{folder}" in services[name]["volumes"]


def test_what_triton_compiles_on_gpus_outlives_the_container_and_is_its_users() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name in ("denoiser-gpu", "denoiser-second-gpu", "controlnet-gpu"):
        folder = compose["services"][name]["environment"]["TRITON_CACHE_DIR"]
        [volume] = [mount for mount in compose["services"][name]["volumes"] if mount.endswith(f":{folder}")]
        assert volume.partition(":")[0] in compose["volumes"]
        assert f" {folder} " in (DEPLOY / "Dockerfile").read_text(), "the image's folder owns the volume"
