"""Loads: the requests of one run each, and which part of them is measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from giornata_lab.loadgen.traces import TraceLine, complete
from giornata_lab.loadgen.workload import (
    ArrivalBursts,
    Workload,
    WorkloadRequest,
    arrival_times,
    crowded_times,
    draw,
    faster,
)

SHORTEST_S: Final = 1.0
"""A trace counts for at least this long."""


@dataclass(frozen=True)
class OfferedLoad:
    """One run's requests.

    Raises:
        ValueError: nothing would be measured.
    """

    rate: float | None
    """Requests a second; None: a trace says when they are due."""
    requests: tuple[WorkloadRequest, ...]
    warmup_s: float
    """Requests due before it are left out of all figures."""
    seconds: float
    """Length of the run after the warm-up."""

    def __post_init__(self) -> None:
        if not any(request.at_s >= self.warmup_s for request in self.requests):
            what = "the trace" if self.rate is None else f"{self.rate:g} requests a second"
            raise ValueError(
                f"no request of {what} is due within {self.seconds:g} s after the warm-up of {self.warmup_s:g} s"
            )


def drawn(
    rates: Sequence[float],
    workload: Workload,
    *,
    cv: float,
    seconds: float,
    warmup_s: float,
    seed: int,
    crowds: ArrivalBursts | None = None,
) -> list[OfferedLoad]:
    """A load for each of `rates` (a second), whose times between requests vary by `cv`; equal seeds make equal loads.

    With `crowds` requests are a Poisson process that is denser at times.

    Raises:
        ValueError: nothing would be measured at a rate.
    """
    loads = []
    for rate in rates:
        whole_s = warmup_s + seconds
        times = (
            arrival_times(rate, whole_s, seed, cv)
            if crowds is None
            else crowded_times(rate, whole_s, seed, crowds)
        )
        requests = draw(times, workload, seed)
        loads.append(OfferedLoad(rate, tuple(requests), warmup_s, seconds))
    return loads


def replayed(
    lines: Sequence[TraceLine], workload: Workload, *, speed: float, warmup_s: float, seed: int
) -> OfferedLoad:
    """The load of a trace, `speed` times as fast as it tells.

    Raises:
        ValueError: all of its requests belong to the warm-up.
    """
    requests = faster(complete(lines, workload, seed), speed)
    seconds = max(SHORTEST_S, requests[-1].at_s - warmup_s)
    return OfferedLoad(None, tuple(requests), warmup_s, seconds)
