"""Prometheus' conventions, held for every metric that a gateway exports, and the dashboard's use of them.

https://prometheus.io/docs/practices/naming: one prefix, base units, the unit last, ``_total`` behind counters alone.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from giornata_gateway.metrics import Metrics

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboards" / "giornata.json"
BASE_UNITS = ("seconds", "bytes")
OTHER_UNITS = {
    *("ms", "us", "ns", "milliseconds", "microseconds", "minutes", "hours", "days"),
    *("kb", "mb", "gb", "kib", "mib", "gib", "kilobytes", "megabytes", "bits", "percent", "pct"),
}
RATES = re.compile(r"\b(?:rate|irate|increase)\((?:giornata_\w+)")
USED = re.compile(r"giornata_\w+")
UNITS = {"s": "seconds", "bytes": "bytes"}
"""Grafana's unit of a panel, and how the names of all that it shows end."""


def exported() -> dict[str, Metric]:
    """Every family by the name that a query uses: that of a counter has its ``_total``."""
    text = Metrics(waiting=lambda: 0).exposition([]).decode()
    return {
        f"{one.name}_total" if one.type == "counter" else one.name: one
        for one in text_string_to_metric_families(text)
        if not one.name.endswith("_created")
    }


EXPORTED = exported()
PANELS = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]


@pytest.mark.parametrize("name", EXPORTED)
def test_a_name_has_the_prefix_a_base_unit_and_total_where_it_counts(name: str) -> None:
    words = name.split("_")
    counts = EXPORTED[name].type == "counter"
    assert re.fullmatch(r"giornata(_[a-z][a-z0-9]*)+", name)
    assert (words[-1] == "total") == counts
    assert OTHER_UNITS.isdisjoint(words), "a base unit is asked for"
    unitless = words[:-1] if counts else words
    assert all(unit not in unitless[:-1] for unit in BASE_UNITS), "the unit is the last word before `total`"
    assert unitless[-1] not in {"count", "sum", "bucket"}, "the library's own endings"
    if EXPORTED[name].type == "histogram":
        assert unitless[-1] in BASE_UNITS


def metric_of(used: str) -> str:
    """The exported metric behind a series."""
    return re.sub(r"_(bucket|sum|count)$", "", used) if used not in EXPORTED else used


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_a_panel_asks_for_metrics_that_exist_and_for_rates_of_what_counts(panel: dict[str, Any]) -> None:
    unit = panel["fieldConfig"]["defaults"].get("unit")
    assert panel["targets"]
    for target in panel["targets"]:
        used = USED.findall(target["expr"])
        assert used
        rated = {one.partition("(")[2] for one in RATES.findall(target["expr"])}
        for one in used:
            metric = EXPORTED[metric_of(one)]
            cumulative = metric.type in {"counter", "histogram"}
            assert (one in rated) == cumulative, f"{one} is a {metric.type}"
        if unit in UNITS:
            assert all(UNITS[unit] in one for one in used), f"the axis says {unit}"
