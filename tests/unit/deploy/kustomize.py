"""Kustomize's build, as far as ``deploy/kubernetes`` uses it: resources, components, namespace, images, and patches.

Anything else in a kustomization is an error. ``test_kubernetes.py`` holds it against Kustomize itself, where that is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import jsonpatch
import yaml

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
