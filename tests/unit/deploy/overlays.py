"""The overlays of ``deploy/kubernetes``, built once, and what tests read of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from pydantic_settings import BaseSettings

from giornata.wire.workers import ServiceName
from giornata_controlnet.config import ControlNetConfig
from giornata_denoiser.config import DenoiserConfig
from giornata_gateway.config import GatewayConfig
from giornata_lora_store.config import LoraStoreConfig
from giornata_prepost.config import PrepostConfig
from giornata_router.config import RouterConfig
from tests.unit.deploy.kustomize import Resource, build, containers, of

ROOT = Path(__file__).parents[3]
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"
CONFIGS: Final[dict[str, type[BaseSettings]]] = {
    ServiceName.GATEWAY: GatewayConfig,
    ServiceName.ROUTER: RouterConfig,
    ServiceName.DENOISER: DenoiserConfig,
    ServiceName.PREPOST: PrepostConfig,
    ServiceName.CONTROLNET: ControlNetConfig,
    ServiceName.LORA_STORE: LoraStoreConfig,
}
SERVERS: Final = {"nats", "valkey"}


def documented() -> list[Resource]:
    """The overlay that the page tells an operator to write: all components."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    [text] = re.findall(r"^```yaml\n(apiVersion: kustomize.*?)^```", page, re.MULTILINE | re.DOTALL)
    return of(yaml.load(text.replace("deploy/kubernetes", "../.."), yaml.CSafeLoader), OVERLAYS / "own", [])


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
    """Settings that any service reads, since all read one map."""
    return set().union(*(kind.model_fields for kind in CONFIGS.values()))


def egress_ports(overlay: str, component: str) -> Iterator[int]:
    """Ports that policies let a service reach, wherever that is."""
    labels = WORKLOADS[overlay, component]["spec"]["template"]["metadata"]["labels"]
    for policy in named(overlay, "NetworkPolicy").values():
        selector = policy["spec"]["podSelector"]
        chosen = selector.get("matchLabels", {}).items() <= labels.items() and all(
            labels[one["key"]] in one["values"] for one in selector.get("matchExpressions", ())
        )
        for rule in policy["spec"].get("egress", ()) if chosen else ():
            yield from (port["port"] for port in rule["ports"])


@cache
def compose() -> dict[str, Any]:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    content: dict[str, Any] = yaml.load(text, yaml.CSafeLoader)["services"]
    return content
