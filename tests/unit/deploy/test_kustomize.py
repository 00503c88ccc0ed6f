"""The build of overlays: against Kustomize where it is there, and what it refuses everywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.patience import HUNG_S
from tests.unit.deploy.kustomize import build, identity

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
