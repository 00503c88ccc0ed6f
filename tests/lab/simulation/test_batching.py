"""Which rows share a step: ours is no worse than batches of whole requests, and what it is without the rule."""

from __future__ import annotations

from statistics import fmean

import pytest

from giornata.scheduling import placement
from giornata_lab.bench.batching import AT_ONCE, BASELINE, OURS, WORKLOADS, simulated
from giornata_lab.simulation.results import SimulationSummary

WITHIN = 1.02
REQUESTS = 300


def ratios(share: float) -> dict[str, float]:
    """Mean latencies of each system, of edits that are alike, ÷ those of request-level batching."""
    found = simulated(WORKLOADS["equal small masks"], "h800-flux", share, REQUESTS, [1])

    def mean(told: list[SimulationSummary]) -> float:
        return fmean(one.mean_s for one in told)

    return {name: mean(told) / mean(found[BASELINE]) for name, told in found.items()}


def test_at_light_load_rows_do_not_join_where_that_would_slow_others_by_more_than_it_gains() -> None:
    found = ratios(0.5)
    assert found[OURS] < WITHIN < found[AT_ONCE]


def test_where_many_wait_rows_join(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ratios(1.0)[OURS] < WITHIN
    monkeypatch.setattr(placement, "slack_while", lambda _waiting, _workers, most: most)
    assert ratios(1.0)[OURS] > WITHIN, "the test sees it where they do not"
