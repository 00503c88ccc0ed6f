"""The overlays of deploy/kubernetes, built once as kustomize builds them, and what tests read of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

import jsonpatch
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

Resource = dict[str, Any]

FILE: Final = "kustomization.yaml"
KNOWN: Final = {"apiVersion", "kind", "namespace", "resources", "components", "patches", "images"}


def build(folder: Path) -> list[Resource]:
    """The resources of the kustomization in `folder`, patched, with their namespace.

    Raises:
        ValueError: it uses something that this build does not know, or a patch meets nothing.
    """
    return of(yaml.load((folder / FILE).read_text(), yaml.CSafeLoader), folder, [])


def of(kustomization: Mapping[str, Any], folder: Path, before: Iterable[Resource]) -> list[Resource]:
    """The resources of a `kustomization` that lies in `folder`, and those `before`, which a component changes."""
    if unknown := kustomization.keys() - KNOWN:
        raise ValueError(f"{folder} uses {sorted(unknown)}; known are {sorted(KNOWN)}")
    found = [*before]
    for name in kustomization.get("resources", ()):
        path = (folder / name).resolve()
        found += build(path) if path.is_dir() else _documents(path)
    for name in kustomization.get("components", ()):
        path = (folder / name).resolve()
        component = yaml.load((path / FILE).read_text(), yaml.CSafeLoader)
        if component["kind"] != "Component":
            raise ValueError(f"{path} is no component")
        found = of(component, path, found)
    for patch in kustomization.get("patches", ()):
        text = patch["patch"] if "patch" in patch else (folder / patch["path"]).read_text()
        found = _patched(found, patch["target"], yaml.load(text, yaml.CSafeLoader), folder)
    for image in kustomization.get("images", ()):
        _retag(found, image["name"], image["newTag"])
    namespace = kustomization.get("namespace")
    for resource in found if namespace else ():
        if resource["kind"] != "Namespace":
            resource["metadata"]["namespace"] = namespace
    names = [identity(resource) for resource in found]
    if len(set(names)) < len(names):
        raise ValueError(f"{folder} names a resource twice: {sorted(names)}")
    return found


def identity(resource: Mapping[str, Any]) -> tuple[str, str]:
    """What tells resources of a build apart."""
    return str(resource["kind"]), str(resource["metadata"]["name"])


def _documents(path: Path) -> list[Resource]:
    # what a YAML anchor names is one object in several places: a patch is to change one place
    return [
        json.loads(json.dumps(document)) for document in yaml.load_all(path.read_text(), yaml.CSafeLoader)
    ]


def _patched(found: list[Resource], target: Mapping[str, str], patch: Any, folder: Path) -> list[Resource]:
    """Every resource of the target's kind and name, patched: by operations (RFC 6902), or by what maps hold."""
    changed = 0
    after: list[Resource] = []
    for resource in found:
        kind, name = identity(resource)
        if kind == target["kind"] and re.fullmatch(target["name"], name):
            changed += 1
            after.append(
                jsonpatch.apply_patch(resource, patch)
                if isinstance(patch, list)
                else _merged(resource, patch)
            )
        else:
            after.append(resource)
    if not changed:
        raise ValueError(f"a patch of {folder} meets nothing: {dict(target)}")
    return after


def _merged(into: Any, patch: Any) -> Any:
    """A strategic merge where it is the same for every kind: of maps."""
    if isinstance(patch, list):
        raise ValueError("a list is merged by rules of its kind; write operations instead")  # noqa: TRY004 - of the file
    if not isinstance(patch, dict):
        return patch
    kept = into if isinstance(into, dict) else {}
    return {**kept, **{key: _merged(kept.get(key), value) for key, value in patch.items()}}


def _retag(found: Iterable[Resource], name: str, tag: str) -> None:
    for resource in found:
        for container in containers(resource):
            if container["image"].rpartition(":")[0] == name:
                container["image"] = f"{name}:{tag}"


def containers(resource: Mapping[str, Any]) -> list[Resource]:
    """The containers of a workload; none of other resources."""
    template = resource.get("spec", {}).get("template", {}) if "spec" in resource else {}
    found: list[Resource] = template.get("spec", {}).get("containers", [])
    return found


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
