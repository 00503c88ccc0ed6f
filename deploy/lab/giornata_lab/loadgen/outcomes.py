"""What became of requests, and the figures of a run. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from giornata_lab.loadgen.workload import WorkloadRequest

NOT_SENT: Final = "too_many_in_flight"
"""Code of a request that was due while as many as allowed had no answer."""


@dataclass(frozen=True)
class ServerAnswer:
    """What a server answered."""

    pictures: int = 0
    code: str | None = None
    """Stable; None for a success."""
    message: str = ""
    """Why, where there is a code."""


@dataclass(frozen=True)
class RequestOutcome:
    """What became of one request; times in seconds from the start of the run."""

    request: WorkloadRequest
    ended_s: float
    """When the whole answer had come; of one that was not sent, when it was due."""
    answer: ServerAnswer
    sent_s: float | None = None
    """When it left; None: it was not sent."""
    in_flight: int = 0
    """Requests without an answer when it left, itself included."""

    @property
    def latency_s(self) -> float:
        """Seconds from when it was due until its answer had come: a late generator does not flatter the server."""
        return self.ended_s - self.request.at_s

    @property
    def late_s(self) -> float:
        """Return how much later than due it left; 0 where it was not sent."""
        return 0.0 if self.sent_s is None else self.sent_s - self.request.at_s


@dataclass(frozen=True)
class DistributionSummary:
    """The spread of several values, in their unit."""

    mean: float
    p50: float
    p95: float
    p99: float
    most: float


@dataclass(frozen=True)
class LoadFigures:
    """Figures of one run; its warm-up is left out of all of them."""

    requests: int
    """Requests that were due, less the ones without an answer when the run was stopped."""
    unfinished: int
    """Requests without an answer when the run was stopped, or not due until then."""
    succeeded: int
    pictures: int
    offered_per_s: float
    """Requests that were due, a second."""
    throughput_per_s: float
    """Requests that succeeded, a second; the seconds run until the last of them had its answer."""
    pictures_per_s: float
    latency_s: DistributionSummary | None
    """Times of the requests that succeeded, from when they were due to their answers; None: none succeeded."""
    slo_s: float | None
    slo_share: float | None
    """Share of all requests that succeeded within `slo_s`: errors and requests that were not sent count against it."""
    goodput_per_s: float | None
    """The same, a second."""
    errors: dict[str, int]
    """Counts by code, the most frequent first."""
    late_s: DistributionSummary | None
    """How much later than due requests left: the generator's own failing."""
    in_flight: int
    """Most requests without an answer."""
    mask_ratio: float
    """Mean of the requests."""


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile by linear interpolation; `values` in any order, at least one."""
    return float(np.percentile(values, percent))


def spread(values: Sequence[float]) -> DistributionSummary | None:
    """Mean and percentiles; None of no values."""
    if not values:
        return None
    p50, p95, p99 = (percentile(values, percent) for percent in (50, 95, 99))
    return DistributionSummary(statistics.fmean(values), p50, p95, p99, max(values))


def figures(
    requests: Sequence[WorkloadRequest],
    outcomes: Sequence[RequestOutcome],
    *,
    warmup_s: float,
    seconds: float,
    slo_s: float | None,
) -> LoadFigures:
    """Return what a run comes to whose `requests` have ended with `outcomes`, some of them maybe without one.

    Requests due before `warmup_s` are left out; `seconds` is the run's length after that. An answer within `slo_s`
    counts as goodput.
    """
    planned = [request for request in requests if request.at_s >= warmup_s]
    counted = [outcome for outcome in outcomes if outcome.request.at_s >= warmup_s]
    good = [outcome for outcome in counted if outcome.answer.code is None]
    met = None if slo_s is None else sum(outcome.latency_s <= slo_s for outcome in good)
    elapsed = max([seconds, *(outcome.ended_s - warmup_s for outcome in good)])
    codes = Counter(outcome.answer.code for outcome in counted if outcome.answer.code is not None)
    pictures = sum(outcome.answer.pictures for outcome in good)
    return LoadFigures(
        requests=len(counted),
        unfinished=len(planned) - len(counted),
        succeeded=len(good),
        pictures=pictures,
        offered_per_s=len(planned) / seconds,
        throughput_per_s=len(good) / elapsed,
        pictures_per_s=pictures / elapsed,
        latency_s=spread([outcome.latency_s for outcome in good]),
        slo_s=slo_s,
        slo_share=None if met is None else met / max(1, len(counted)),
        goodput_per_s=None if met is None else met / elapsed,
        errors=dict(codes.most_common()),
        late_s=spread([outcome.late_s for outcome in counted if outcome.sent_s is not None]),
        in_flight=max((outcome.in_flight for outcome in counted), default=0),
        mask_ratio=statistics.fmean(o.request.mask_ratio for o in counted) if counted else 0.0,
    )
