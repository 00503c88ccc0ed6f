"""Every overlay is valid to the API's schemas, and agrees with the services, with Compose, and within itself."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import jsonschema  # type: ignore[import-untyped]  # has no types
import kubernetes_validate
import pytest
import yaml
from pydantic_settings import BaseSettings

from giornata.wire.workers import ServiceName
from giornata_controlnet.config import ControlNetConfig
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.service import HAND_BACK_S
from giornata_gateway.config import GatewayConfig
from giornata_gateway.http.routes import ROUTES
from giornata_gateway.http.server import CLOSE_S
from giornata_gateway.metrics import Metrics
from giornata_lora_store.config import LoraStoreConfig
from giornata_prepost.config import PrepostConfig
from giornata_router.config import RouterConfig
from tests.unit.deploy.kustomize import Resource, build, containers, identity, of

ROOT = Path(__file__).parents[3]
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"
VERSIONS: Final = ("1.30", "1.37")
"""The oldest and the newest API that the manifests are for."""
CONFIGS: Final[dict[str, type[BaseSettings]]] = {
    ServiceName.GATEWAY: GatewayConfig,
    ServiceName.ROUTER: RouterConfig,
    ServiceName.DENOISER: DenoiserConfig,
    ServiceName.PREPOST: PrepostConfig,
    ServiceName.CONTROLNET: ControlNetConfig,
    ServiceName.LORA_STORE: LoraStoreConfig,
}
SERVERS: Final = {"nats", "valkey"}
KEDA: Final = "ScaledObject"
PROMETHEUS: Final = {"serverAddress", "query", "threshold"}
SCALED: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["scaleTargetRef", "triggers"],
    "properties": {
        "scaleTargetRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"kind": {"type": "string"}, "name": {"type": "string"}},
        },
        "pollingInterval": {"type": "integer"},
        "minReplicaCount": {"type": "integer"},
        "maxReplicaCount": {"type": "integer"},
        "advanced": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "horizontalPodAutoscalerConfig": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"behavior": {"type": "object"}},
                }
            },
        },
        "triggers": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["type", "metadata"],
                "properties": {
                    "type": {"const": "prometheus"},
                    "name": {"type": "string"},
                    "metricType": {"enum": ["Value", "AverageValue"]},
                    "metadata": {
                        "type": "object",
                        "required": sorted(PROMETHEUS),
                        "propertyNames": {"enum": sorted(PROMETHEUS)},
                        "additionalProperties": {"type": "string"},
                    },
                },
            },
        },
    },
}
"""Of ``spec`` of keda.sh/v1alpha1, what is used here. Its behavior is an HPA's, and is tested as one."""


def documented() -> list[Resource]:
    """The overlay that the page tells an operator to write: GPUs, three NATS servers and ControlNets."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [text] = re.findall(r"^```yaml\n(apiVersion: kustomize.*?)^```", page, re.MULTILINE | re.DOTALL)
    return of(yaml.safe_load(text.replace("deploy/kubernetes", "../..")), OVERLAYS / "own", [])


BUILT: Final = {path.name: build(path) for path in sorted(OVERLAYS.iterdir())} | {"documented": documented()}
WORKLOADS: Final = {
    (overlay, resource["metadata"]["name"]): resource
    for overlay, resources in BUILT.items()
    for resource in resources
    if resource["kind"] in {"Deployment", "StatefulSet"}
}
OURS: Final = {key: workload for key, workload in WORKLOADS.items() if key[1] not in SERVERS}
every_overlay = pytest.mark.parametrize("overlay", BUILT)
every_workload = pytest.mark.parametrize("key", WORKLOADS, ids="-".join)
every_service = pytest.mark.parametrize("key", OURS, ids="-".join)


def named(overlay: str, kind: str) -> dict[str, Resource]:
    return {one["metadata"]["name"]: one for one in BUILT[overlay] if one["kind"] == kind}


def container_of(workload: Mapping[str, Any]) -> Resource:
    [container] = containers(workload)
    return container


def told(key: tuple[str, str]) -> dict[str, str]:
    """What a workload's container is told by variables; those of another field as that field's path."""
    overlay, container = key[0], container_of(WORKLOADS[key])
    maps = named(overlay, "ConfigMap")
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        if "configMapRef" in source:
            found |= maps[source["configMapRef"]["name"]]["data"]
        else:
            assert source["secretRef"] == {"name": "giornata-overrides", "optional": True}
    for variable in container.get("env", ()):
        value = variable.get("value")
        found[variable["name"]] = variable["valueFrom"]["fieldRef"]["fieldPath"] if value is None else value
    return found


def config_of(key: tuple[str, str]) -> Any:
    settings = {
        name.removeprefix("GIORNATA_").lower(): value
        for name, value in told(key).items()
        if name.startswith("GIORNATA_")
    }
    kind = CONFIGS[key[1]]
    assert settings.keys() <= kind.model_fields.keys() | shared_settings(), "a service reads each of them"
    return kind.model_validate({name: value for name, value in settings.items() if name in kind.model_fields})


def shared_settings() -> set[str]:
    """Those of the map that all services read, of which a gateway has no use for the cell."""
    return set().union(*(kind.model_fields for kind in CONFIGS.values()))


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_resources_are_valid_to_the_apis_schemas(overlay: str, version: str) -> None:
    for resource in BUILT[overlay]:
        if resource["kind"] == KEDA:
            assert resource["apiVersion"] == "keda.sh/v1alpha1"
            jsonschema.validate(resource["spec"], SCALED)
            resource = hpa_of(resource)  # noqa: PLW2901 - what KEDA makes of it
        kubernetes_validate.validate(resource, version, strict=True)


def hpa_of(scaled: Resource) -> Resource:
    spec = scaled["spec"]
    target = {"apiVersion": "apps/v1", **spec["scaleTargetRef"]}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled["metadata"],
        "spec": {
            "scaleTargetRef": target,
            "minReplicas": spec["minReplicaCount"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }


@every_overlay
def test_an_overlay_runs_every_service_and_the_servers_that_it_does_not_find_elsewhere(overlay: str) -> None:
    ours = {str(name) for name in ServiceName} - (
        {str(ServiceName.CONTROLNET)} if overlay != "documented" else set()
    )
    servers = set() if overlay == "external" else SERVERS
    assert {name for where, name in WORKLOADS if where == overlay} == ours | servers
    namespaces = {one["metadata"].get("namespace") for one in BUILT[overlay] if one["kind"] != "Namespace"}
    assert namespaces == set(named(overlay, "Namespace"))


@every_service
def test_variables_are_options_that_the_service_reads(key: tuple[str, str]) -> None:
    config = config_of(key)
    assert str(config.nats_password_file) == "/credentials/password"
    replicas = named(key[0], "StatefulSet").get("nats", {"spec": {"replicas": 3}})["spec"]["replicas"]
    assert config.replicas == replicas
    if "external" not in key:
        hosts = re.findall(r"//([^:,]+):4222", config.nats_url)
        assert hosts == (["nats"] if replicas == 1 else [f"nats-{index}.nats" for index in range(replicas)])
        assert re.findall(r"//([^:]+):6379", config.blobs_url) == ["valkey"]
    assert getattr(config, "device_claims", None) is None, "the device plugin gives each container its own"


@every_service
def test_what_is_killed_has_had_time_to_drain(key: tuple[str, str]) -> None:
    config, grace_s = (
        config_of(key),
        WORKLOADS[key]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
    )
    notice_s = getattr(config, "notice_s", 0.0)
    assert grace_s >= notice_s + config.drain_s + 15
    assert grace_s == compose_grace_s(key[1])
    if key[1] == ServiceName.DENOISER:
        assert grace_s > config.drain_s + HAND_BACK_S
    if key[1] == ServiceName.GATEWAY:
        assert grace_s > notice_s + config.drain_s + CLOSE_S
        assert config.drain_s >= config.budget_s


def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    return content


def compose_grace_s(name: str) -> int:
    return int(compose()[name]["stop_grace_period"].removesuffix("s"))


@every_workload
def test_images_are_those_of_compose(key: tuple[str, str]) -> None:
    overlay, name = key
    computing = name in {"denoiser", "prepost", "controlnet"}
    on_gpu = computing and name != "controlnet" and overlay in {"gpu", "documented"}
    image = container_of(WORKLOADS[key])["image"]
    assert image == compose()[f"{name}-gpu" if on_gpu else name]["image"]


@every_workload
def test_a_container_has_no_rights_and_bounded_memory(key: tuple[str, str]) -> None:
    pod = WORKLOADS[key]["spec"]["template"]["spec"]
    container = container_of(WORKLOADS[key])
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] == 10001, (
        "as in the images"
    )
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    assert {"cpu", "memory"} <= container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    claims = {one["metadata"]["name"] for one in WORKLOADS[key]["spec"].get("volumeClaimTemplates", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())} | claims


@every_service
def test_a_service_is_given_its_own_password_and_no_other(key: tuple[str, str]) -> None:
    pod = WORKLOADS[key]["spec"]["template"]["spec"]
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    assert secrets == [f"nats-{key[1]}", *(["api-keys"] if key[1] == ServiceName.GATEWAY else [])]
    mounts = {mount["name"]: mount for mount in container_of(WORKLOADS[key])["volumeMounts"]}
    assert (mounts["credentials"]["mountPath"], mounts["credentials"]["readOnly"]) == ("/credentials", True)


def probes(container: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        if kind in container:
            yield kind, container[kind]


@every_workload
def test_probes_ask_for_what_is_there(key: tuple[str, str]) -> None:
    container = container_of(WORKLOADS[key])
    ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
    found = dict(probes(container))
    assert {"startupProbe", "readinessProbe"} <= found.keys()
    for kind, probe in found.items():
        if "exec" in probe and key[1] not in SERVERS:
            assert probe["exec"]["command"] == ["python", "-m", "giornata.probe", key[1]]
            assert kind != "livenessProbe", "a service that waits for NATS would be killed"
            assert probe["timeoutSeconds"] > 3, "it listens for three seconds"
        if "httpGet" in probe:
            assert probe["httpGet"]["port"] in ports
        if key[1] == ServiceName.GATEWAY and "httpGet" in probe:
            assert probe["httpGet"]["path"] in {route.path for route in ROUTES}
        if key[1] == "nats":
            assert ports[probe["httpGet"]["port"]] == 8222
    if key[1] == ServiceName.GATEWAY:
        config = config_of(key)
        assert ports == {"http": config.port}
        ready = found["readinessProbe"]
        assert ready["httpGet"]["path"] == "/readyz"
        assert ready["periodSeconds"] * ready["failureThreshold"] < config.notice_s, "it is noticed in time"


@every_overlay
def test_services_lead_to_ports_of_their_pods(overlay: str) -> None:
    for name, service in named(overlay, "Service").items():
        template = WORKLOADS[overlay, name]["spec"]["template"]
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        ports = {port["name"] for port in container_of(WORKLOADS[overlay, name])["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


@every_overlay
def test_autoscalers_ask_for_metrics_that_the_gateway_exports(overlay: str) -> None:
    exported = set(
        re.findall(r"^# TYPE (giornata_\w+) gauge$", Metrics(lambda: 0).exposition([]).decode(), re.MULTILINE)
    )
    scaled = named(overlay, KEDA)["denoiser"]["spec"]
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["triggers"]}
    for query in queries.values():
        asked = set(re.findall(r"giornata_\w+", query))
        assert asked
        assert asked <= exported
        assert re.search(r"\bmax\b", query), "every gateway tells the whole fleet"
    assert "giornata_router_predicted_wait_seconds" in queries["predicted-wait"]
    cell = re.search(r'cell="(\w+)"', queries["predicted-wait"])
    assert cell is not None
    assert cell[1] == config_of((overlay, "denoiser")).cell
    annotations = WORKLOADS[overlay, "gateway"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/path"] in {route.path for route in ROUTES}
    assert int(annotations["prometheus.io/port"]) == config_of((overlay, "gateway")).port


@every_overlay
def test_what_an_autoscaler_decides_is_in_no_manifest(overlay: str) -> None:
    scalers = [*named(overlay, "HorizontalPodAutoscaler").values(), *named(overlay, KEDA).values()]
    scaled = {one["spec"]["scaleTargetRef"]["name"] for one in scalers}
    assert scaled == {"gateway", "denoiser", "prepost"}
    for name in scaled:
        assert "replicas" not in WORKLOADS[overlay, name]["spec"], "applying it again would undo the scaling"


@every_overlay
def test_a_drained_node_leaves_one_of_each_that_has_several(overlay: str) -> None:
    budgets = named(overlay, "PodDisruptionBudget")
    several = {"gateway", "router", "denoiser", "prepost"}
    several |= (
        {"controlnet", "nats"}
        if overlay == "documented"
        else {"nats"}
        if overlay == "nats-cluster"
        else set()
    )
    assert budgets.keys() == several
    for name, budget in budgets.items():
        labels = WORKLOADS[overlay, name]["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


@every_overlay
def test_policies_name_ports_that_are_listened_to(overlay: str) -> None:
    policies = named(overlay, "NetworkPolicy")
    assert policies["nothing-but-names"]["spec"]["podSelector"] == {}
    assert policies["nothing-but-names"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    for name, policy in policies.items():
        for rule in policy["spec"].get("ingress", ()):
            chosen = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            ports = {port["containerPort"] for port in container_of(WORKLOADS[overlay, chosen])["ports"]}
            assert {port["port"] for port in rule["ports"]} <= ports, name
    for service in (str(name) for where, name in OURS if where == overlay):
        assert {4222, 6379} <= set(egress_ports(overlay, service)), f"{service} reaches NATS and blobs"


def egress_ports(overlay: str, component: str) -> Iterator[int]:
    labels = WORKLOADS[overlay, component]["spec"]["template"]["metadata"]["labels"]
    for policy in named(overlay, "NetworkPolicy").values():
        selector = policy["spec"]["podSelector"]
        chosen = selector.get("matchLabels", {}).items() <= labels.items() and all(
            labels[one["key"]] in one["values"] for one in selector.get("matchExpressions", ())
        )
        for rule in policy["spec"].get("egress", ()) if chosen else ():
            yield from (port["port"] for port in rule["ports"])


@pytest.mark.parametrize("overlay", ["gpu", "documented"])
def test_a_replica_has_a_gpu_and_its_successor_waits_for_it(overlay: str) -> None:
    for name in ("denoiser", "prepost"):
        workload = WORKLOADS[overlay, name]
        assert container_of(workload)["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        [shm] = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
    assert not any("nvidia" in str(workload) for (where, _), workload in WORKLOADS.items() if where == "cpu")


@pytest.mark.parametrize("overlay", [name for name in BUILT if name != "external"])
def test_servers_are_configured_as_composes(overlay: str) -> None:
    files = named(overlay, "ConfigMap")["nats"]["data"]
    expected = (
        ["nats.conf", "nats-cluster.conf"] if overlay in {"nats-cluster", "documented"} else ["nats.conf"]
    )
    assert sorted(files) == sorted(expected)
    for name in files:
        assert files[name] == (ROOT / "deploy" / name).read_text()
    nats = WORKLOADS[overlay, "nats"]["spec"]
    assert container_of(WORKLOADS[overlay, "nats"])["args"] == ["--config", f"/etc/nats/{expected[-1]}"]
    [config] = nats["template"]["spec"]["volumes"]
    items = {item["path"] for item in config["projected"]["sources"][1]["secret"]["items"]}
    included = set(re.findall(r'include "(users/.+)"', "".join(files.values())))
    assert items == included
    valkey = container_of(WORKLOADS[overlay, "valkey"])["args"]
    assert valkey == [re.sub(r"\$\{\w+:-(.*)\}", r"\1", one) for one in compose()["valkey"]["command"]]


def test_the_page_makes_every_secret_that_a_manifest_names() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    made = set(re.findall(r"create secret generic (\S+)", page.replace("\\\n", "")))
    loops = re.findall(r"for name in (.+); do", page)
    made = {one.replace("$name", name) for one in made for line in loops for name in line.split()} - {
        "nats-$name"
    }
    used = {
        name
        for resources in BUILT.values()
        for name in re.findall(r"'(?:secretName|name)': '((?:nats-[a-z-]+|api-keys))'", str(resources))
        if name in {"api-keys", "nats-server"}
        or name.removeprefix("nats-") in {str(one) for one in ServiceName}
    }
    assert used <= made
    assert identity(BUILT["cpu"][0])[0] == "Namespace", "it is there before what lies in it"
