"""The alarms that ship ask for metrics that exist, are the same everywhere, and go off when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.overlays import named
from tests.unit.gateway.test_metrics import EXPORTED, RATES, USED, metric_of

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
FILE = DEPLOY / "prometheus" / "alarms.yml"
GROUPS: list[dict[str, Any]] = yaml.load(FILE.read_text(encoding="utf-8"), yaml.CSafeLoader)["groups"]
RULES: list[dict[str, Any]] = [rule for group in GROUPS for rule in group["rules"]]
PROMTOOL = shutil.which("promtool")
LABELS = re.compile(r"\bby \(([^)]*)\)|(\w+)=~?\"|\$labels\.(\w+)")


def test_there_are_alarms_and_each_has_a_name_of_its_own() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 10


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_an_alarm_asks_for_metrics_and_labels_that_gateways_export(rule: dict[str, Any]) -> None:
    used = USED.findall(rule["expr"])
    assert used
    rated = {one.partition("(")[2] for one in RATES.findall(rule["expr"])}
    for one in used:
        assert metric_of(one) in EXPORTED, one
        assert (one in rated) == (EXPORTED[metric_of(one)].type in {"counter", "histogram"}), one
    sources = (ROOT / "services/gateway/giornata_gateway").glob("*metrics.py")
    source = " ".join(path.read_text(encoding="utf-8") for path in sources)
    told = f"{rule['expr']} {rule['annotations']['summary']}"
    for label in {
        part.strip() for found in LABELS.findall(told) for one in found for part in one.split(",")
    } - {""}:
        assert f'"{label}"' in source, label


def test_kubernetes_has_the_same_rules() -> None:
    (rules,) = named("documented", "PrometheusRule").values()
    assert rules["apiVersion"] == "monitoring.coreos.com/v1"
    assert rules["spec"] == {"groups": GROUPS}


def test_prometheus_reads_them_where_compose_puts_them() -> None:
    (name,) = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))["rule_files"]
    assert (DEPLOY / name) == FILE
    mounts = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))["services"]["prometheus"][
        "volumes"
    ]
    assert f"./{name}:/etc/prometheus/{name}:ro" in mounts
    assert "./prometheus.yml:/etc/prometheus/prometheus.yml:ro" in mounts


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing: apt-get install prometheus")
@pytest.mark.parametrize(
    "words",
    [
        ("check", "config", "deploy/prometheus.yml"),
        ("check", "rules", "deploy/prometheus/alarms.yml"),
        ("test", "rules", "tests/unit/deploy/alarms.test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(words: tuple[str, ...]) -> None:
    done = subprocess.run([str(PROMTOOL), *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
