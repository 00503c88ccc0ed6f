"""When requests arrive. Pure."""

from __future__ import annotations

import random


def arrival_times(rate: float, seconds: float, seed: int, cv: float = 1.0) -> list[float]:
    """Times below `seconds` of a renewal process of `rate` a second.

    The times between arrivals follow a gamma distribution: a Poisson process where its coefficient of variation `cv` is
    1, bursts above, evenly spaced at 0.

    Args:
        rate: arrivals a second in the mean; above 0.
        seconds: how long.
        seed: of chance.
        cv: standard deviation of the times between arrivals over their mean; 0 or more.

    Raises:
        ValueError: `rate` or `cv` is out of range.
    """
    if rate <= 0 or cv < 0:
        raise ValueError(f"a rate is above 0 and a cv 0 or more; received {rate:g} and {cv:g}")
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    shape = cv**-2 if cv else 0.0
    times: list[float] = []
    now = 0.0
    while True:
        now += chance.gammavariate(shape, 1 / (shape * rate)) if cv else 1 / rate
        if now >= seconds:
            return times
        times.append(now)
