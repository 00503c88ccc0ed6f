"""Metrics that are made at each scrape, under the names of Giornata."""

from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily


def gauge(name: str, meaning: str, *labels: str) -> GaugeMetricFamily:
    """A gauge with these labels."""
    return GaugeMetricFamily(f"giornata_{name}", meaning, labels=labels)


def counter(name: str, meaning: str, *labels: str) -> CounterMetricFamily:
    """A counter with these labels; its name gets ``_total``."""
    return CounterMetricFamily(f"giornata_{name}", meaning, labels=labels)
