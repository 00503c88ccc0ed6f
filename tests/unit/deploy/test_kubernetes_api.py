"""Every overlay is valid to the API's schemas; services, autoscalers, budgets and policies meet its workloads."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Final

import jsonschema  # type: ignore[import-untyped]  # has no types
import kubernetes_validate
import pytest

from giornata.wire.workers import ServiceName
from giornata_gateway.http.routes import ROUTES
from giornata_gateway.metrics import Metrics
from tests.unit.deploy.kustomize import Resource
from tests.unit.deploy.overlays import (
    BUILT,
    OURS,
    SERVERS,
    WORKLOADS,
    config_of,
    container_of,
    egress_ports,
    every_overlay,
    named,
)

VERSIONS: Final = ("1.30", "1.37")
"""The oldest and the newest API that the manifests are for."""
KEDA: Final = "ScaledObject"
RULES: Final = "PrometheusRule"
"""The Prometheus operator's; test_alarms.py holds its rules to those that promtool checks."""
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
"""The part of keda.sh/v1alpha1's ``spec`` used here. Its behavior is an HPA's, and is tested as one."""


@pytest.mark.parametrize("version", VERSIONS)
@every_overlay
def test_resources_are_valid_to_the_apis_schemas(overlay: str, version: str) -> None:
    for resource in BUILT[overlay]:
        if resource["kind"] == RULES:
            assert (resource["apiVersion"], set(resource["spec"])) == ("monitoring.coreos.com/v1", {"groups"})
            continue
        if resource["kind"] == KEDA:
            assert resource["apiVersion"] == "keda.sh/v1alpha1"
            jsonschema.validate(resource["spec"], SCALED)
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
