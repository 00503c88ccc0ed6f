"""Overlays: built as Kustomize does, valid to the API, and in agreement with the services, Compose and the page."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from functools import cache
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml

from giornata.model_cards import model_memory
from giornata.wire.workers import ServiceName
from giornata_denoiser.service import HAND_BACK_S
from giornata_gateway.http.routes import ROUTES
from giornata_gateway.http.server import CLOSE_S
from giornata_gateway.metrics import Metrics
from giornata_gateway.webhooks import may_connect
from tests.fakes.published import published
from tests.patience import HUNG_S
from tests.unit.deploy.overlays import (
    BUILT,
    OURS,
    ROOT,
    SERVERS,
    WORKLOADS,
    Resource,
    build,
    compose,
    config_of,
    container_of,
    egress_ports,
    every_overlay,
    every_service,
    every_workload,
    identity,
    named,
)


@every_service
def test_variables_are_options_that_the_service_reads(key: tuple[str, str]) -> None:
    config = config_of(key)
    assert str(config.nats_password_file) == "/credentials/password"
    replicas = named(key[0], "StatefulSet").get("nats", {"spec": {"replicas": 3}})["spec"]["replicas"]
    assert config.replicas == replicas
    if "external" not in key:
        hosts = re.findall(r"//([^:,]+):4222", config.nats_url)
        assert hosts == (["nats"] if replicas == 1 else [f"nats-{index}.nats" for index in range(replicas)])
        stores = re.findall(r"//([^:/]+)", config.blobs_url)
        assert stores == (["pictures"] if key[0] == "documented" else ["valkey"])
    for folder in ("device_claims", "device_ledger"):
        assert getattr(config, folder, None) is None, "the device plugin gives each container its own"


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


def compose_grace_s(name: str) -> int:
    return int(compose()[name]["stop_grace_period"].removesuffix("s"))


@every_workload
def test_images_are_those_of_compose(key: tuple[str, str]) -> None:
    overlay, name = key
    computing = name in {"denoiser", "prepost", "controlnet"}
    on_gpu = computing and overlay in {"gpu", "documented"}
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


@pytest.mark.parametrize("overlay", ["gpu", "documented"])
@pytest.mark.parametrize("name", ["flux", "qwen-image", "z-image", "sdxl"])
def test_on_gpus_host_memory_holds_what_passes_through_it(name: str, overlay: str, tmp_path: Path) -> None:
    """Weights, and four GiB for the process itself and, of prepost, the pictures that it works on."""
    model = model_memory(published(tmp_path, name))
    for service, weights in (
        (ServiceName.DENOISER, model.network),
        (ServiceName.PREPOST, model.encoders + model.autoencoder),
    ):
        resources = container_of(WORKLOADS[overlay, service])["resources"]
        limit, request = (
            int(resources[kind]["memory"].removesuffix("Gi")) << 30 for kind in ("limits", "requests")
        )
        assert weights + (4 << 30) <= limit
        assert request <= limit


@every_service
def test_a_service_is_given_its_own_password_and_no_other(key: tuple[str, str]) -> None:
    pod = WORKLOADS[key]["spec"]["template"]["spec"]
    secrets = [volume["secret"]["secretName"] for volume in pod["volumes"] if "secret" in volume]
    gateways = ["api-keys", *(["webhooks"] if key[0] == "documented" else [])]
    assert secrets == [f"nats-{key[1]}", *(gateways if key[1] == ServiceName.GATEWAY else [])]
    mounts = {mount["name"]: mount for mount in container_of(WORKLOADS[key])["volumeMounts"]}
    assert (mounts["credentials"]["mountPath"], mounts["credentials"]["readOnly"]) == ("/credentials", True)


def test_gateways_with_webhooks_read_their_secret_and_reach_receivers() -> None:
    gateway = WORKLOADS["documented", "gateway"]["spec"]["template"]["spec"]
    [mount] = [m for m in gateway["containers"][0]["volumeMounts"] if m["name"] == "webhooks"]
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [file] = re.findall(r"create secret generic webhooks --from-file=(\w+)=", page)
    assert str(config_of(("documented", "gateway")).webhook_secret_file) == f"{mount['mountPath']}/{file}"
    assert config_of(("cpu", "gateway")).webhook_secret_file is None
    policy = named("documented", "NetworkPolicy")["gateways-reach-receivers"]["spec"]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == ServiceName.GATEWAY
    [rule] = policy["egress"]
    [target] = rule["to"]
    for network in target["ipBlock"]["except"]:
        assert not may_connect(ip_network(network)[1], (), plain=False), (
            "the policy refuses what the gateway refuses"
        )
    assert "gateways-reach-receivers" not in named("cpu", "NetworkPolicy")


@pytest.mark.parametrize("name", [str(name) for name in ServiceName])
def test_what_a_component_offers_its_policy_lets_out(name: str) -> None:
    reached = set(egress_ports("documented", name))
    config = config_of(("documented", name))
    traces = urlsplit(config.traces_url)
    assert config.blobs_url.startswith("s3://")
    assert {traces.port, 443} <= reached
    policy = named("documented", "NetworkPolicy")["spans-go-to-the-collector"]["spec"]
    [target] = policy["egress"][0]["to"]
    namespace = target["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
    assert str(traces.hostname).rpartition(".")[2] == namespace, "the address and the policy name one place"


def test_without_these_components_a_gateway_reaches_its_servers_alone() -> None:
    assert set(egress_ports("cpu", ServiceName.GATEWAY)) == {53, 4222, 6379}


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
        if key[1] == "nats" and "exec" in probe:
            assert probe["exec"]["command"] == ["sh", "/etc/nats/nats-health.sh"]
        elif key[1] == "nats":
            assert ports[probe["httpGet"]["port"]] == 8222
    if key[1] == ServiceName.GATEWAY:
        config = config_of(key)
        assert ports == {"http": config.port}
        ready = found["readinessProbe"]
        assert ready["httpGet"]["path"] == "/readyz"
        assert ready["periodSeconds"] * ready["failureThreshold"] < config.notice_s, "it is noticed in time"


@pytest.mark.parametrize("overlay", ["gpu", "documented"])
def test_a_replica_has_a_gpu_and_its_successor_waits_for_it(overlay: str) -> None:
    for name in ("denoiser", "prepost", *(["controlnet"] if overlay == "documented" else [])):
        workload = WORKLOADS[overlay, name]
        assert config_of((overlay, name)).device == "cuda", "it starts on no CPU instead"
        assert container_of(workload)["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert workload["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
        [shm] = [v for v in workload["spec"]["template"]["spec"]["volumes"] if v["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
    assert not any("nvidia" in str(workload) for (where, _), workload in WORKLOADS.items() if where == "cpu")


@pytest.mark.parametrize("overlay", [name for name in BUILT if name != "external"])
def test_servers_are_configured_as_composes(overlay: str) -> None:
    files = named(overlay, "ConfigMap")["nats"]["data"]
    clustered = ["nats-cluster.conf"] if overlay in {"nats-cluster", "documented"} else []
    expected = ["nats-health.sh", "nats.conf", *clustered]
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
        for name in re.findall(
            r"'(?:secretName|name)': '((?:nats-[a-z-]+|api-keys|webhooks))'", str(resources)
        )
        if name in {"api-keys", "nats-server", "webhooks"}
        or name.removeprefix("nats-") in {str(one) for one in ServiceName}
    }
    assert used <= made
    assert identity(BUILT["cpu"][0])[0] == "Namespace", "it is there before what lies in it"


# Every overlay is valid to the API's schemas; services, autoscalers, budgets and policies meet its workloads.


VERSIONS: Final = ("1.30", "1.37")
"""The oldest and the newest API that the manifests are for."""
KEDA: Final = "ScaledObject"
RULES: Final = "PrometheusRule"
"""The Prometheus operator's; test_alarms.py holds its rules to those that promtool checks."""
PROMETHEUS: Final = {"serverAddress", "query", "threshold"}


def check_scaled(spec: Resource) -> None:
    """The part of keda.sh/v1alpha1's ``spec`` that is used here. Its behavior is an HPA's, and is tested as one."""
    bounds = {"pollingInterval", "minReplicaCount", "maxReplicaCount"}
    assert spec.keys() <= {"scaleTargetRef", "advanced", "triggers"} | bounds
    assert all(isinstance(spec[name], int) for name in bounds & spec.keys())
    assert {"name"} <= spec["scaleTargetRef"].keys() <= {"kind", "name"}
    assert [[*each] for each in spec["advanced"].values()] == [["behavior"]]
    assert spec["triggers"]
    for trigger in spec["triggers"]:
        assert trigger.keys() <= {"type", "name", "metricType", "metadata"}
        assert trigger["type"] == "prometheus"
        assert trigger.get("metricType", "Value") in {"Value", "AverageValue"}
        assert trigger["metadata"].keys() == PROMETHEUS
        assert all(isinstance(value, str) for value in trigger["metadata"].values())


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_resources_are_valid_to_the_apis_schemas(overlay: str, version: str) -> None:
    for resource in BUILT[overlay]:
        if resource["kind"] == RULES:
            assert (resource["apiVersion"], set(resource["spec"])) == ("monitoring.coreos.com/v1", {"groups"})
            continue
        if resource["kind"] == KEDA:
            assert resource["apiVersion"] == "keda.sh/v1alpha1"
            check_scaled(resource["spec"])
            resource = hpa_of(resource)  # noqa: PLW2901 - what KEDA makes of it
        _validate(json.dumps(resource), version)


@cache
def _validate(resource: str, version: str) -> None:
    """Once, of those that several overlays have alike: it takes its time."""
    kubernetes_validate.validate(json.loads(resource), version, strict=True)


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


# The build of overlays: against Kustomize where it is there, and what it refuses everywhere.


OVERLAYS = sorted((Path(__file__).parents[3] / "deploy" / "kubernetes" / "overlays").iterdir())
KUBECTL = os.environ.get("KUBECTL") or shutil.which("kubectl")


@pytest.mark.skipif(KUBECTL is None, reason="there is no kubectl; KUBECTL may name one")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: path.name)
def test_kustomize_builds_the_same(overlay: Path) -> None:
    assert KUBECTL is not None
    built = subprocess.run(
        [KUBECTL, "kustomize", str(overlay)], capture_output=True, text=True, check=True, timeout=HUNG_S
    )
    theirs = {identity(one): one for one in yaml.safe_load_all(built.stdout)}
    assert {identity(one): one for one in build(overlay)} == theirs


def kustomization(folder: Path, text: str) -> Path:
    (folder / "kustomization.yaml").write_text(f"kind: Kustomization\nresources: [map.yaml]\n{text}")
    (folder / "map.yaml").write_text(
        "kind: ConfigMap\nmetadata: {name: m, labels: &l {a: b}}\n"
        "data: {x: '1', y: '2'}\nspec: {again: *l, list: [1]}\n"
    )
    return folder


def test_patches_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    text = """
patches:
  - target: {kind: ConfigMap, name: m}
    patch: |-
      - {op: add, path: /metadata/labels/c, value: d}
  - target: {kind: ConfigMap, name: "m|n"}
    patch: |-
      data: {y: '3', z: '4'}
"""
    [built] = build(kustomization(tmp_path, text))
    assert built["data"] == {"x": "1", "y": "3", "z": "4"}
    assert built["metadata"]["labels"] == {"a": "b", "c": "d"}
    assert built["spec"] == {"again": {"a": "b"}, "list": [1]}, "an anchor's copy stays"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("namePrefix: x\n", "uses .'namePrefix'."),
        ("patches: [{target: {kind: ConfigMap, name: o}, patch: 'data: {}'}]\n", "meets nothing"),
        ("patches: [{target: {kind: ConfigMap, name: m}, patch: 'spec: {list: [2]}'}]\n", "write operations"),
    ],
)
def test_what_it_does_not_know_is_refused(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build(kustomization(tmp_path, text))
