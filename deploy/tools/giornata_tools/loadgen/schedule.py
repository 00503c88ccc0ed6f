"""Loads: the requests of one run each, and which part of them is measured. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from giornata_tools.loadgen.arrivals import arrival_times
from giornata_tools.loadgen.trace import TraceLine, complete
from giornata_tools.loadgen.workload import Request, Workload, draw, faster

SHORTEST_S = 1.0
"""A trace counts for at least this long."""


@dataclass(frozen=True)
class OfferedLoad:
    """One run's requests."""

    rate: float | None
    """Requests a second; None: a trace says when they are due."""
    requests: tuple[Request, ...]
    warmup_s: float
    """Requests due before it are left out of all figures."""
    seconds: float
    """Length of the run after the warm-up."""


@dataclass(frozen=True)
class Arrivals:
    """How requests arrive by chance."""

    rates: Sequence[float]
    """Rates a second; there is a run for each."""
    cv: float
    """Coefficient of variation of the times between them."""
    seconds: float
    """Length of the run after the warm-up."""


def drawn(arriving: Arrivals, workload: Workload, *, warmup_s: float, seed: int) -> list[OfferedLoad]:
    """A load for each rate; equal seeds make equal loads.

    Raises:
        ValueError: nothing would be measured at a rate.
    """
    until = warmup_s + arriving.seconds
    loads = []
    for rate in arriving.rates:
        requests = draw(arrival_times(rate, until, seed, arriving.cv), workload, seed)
        loads.append(_measured(OfferedLoad(rate, tuple(requests), warmup_s, arriving.seconds)))
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
    return _measured(OfferedLoad(None, tuple(requests), warmup_s, seconds))


def _measured(load: OfferedLoad) -> OfferedLoad:
    if not any(request.at_s >= load.warmup_s for request in load.requests):
        what = "the trace" if load.rate is None else f"{load.rate:g} requests a second"
        raise ValueError(
            f"no request of {what} is due within {load.seconds:g} s after the warm-up of {load.warmup_s:g} s"
        )
    return load
