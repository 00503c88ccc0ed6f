"""Which edits are asked for: masks, steps, pictures and templates as in production, or fixed. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from giornata_lab.loadgen.adapters import AdapterWorkload
from giornata_lab.loadgen.distributions import Mix, at_percentile, chosen


class MaskShape(StrEnum):
    """What a mask looks like."""

    BLOB = "blob"
    """A round patch with a wavy rim, as people paint them."""
    SQUARE = "square"


@dataclass(frozen=True)
class WorkloadRequest:
    """One request: when it is due, and what it asks for."""

    at_s: float
    """Seconds from the start of the run."""
    template: int
    """Which picture."""
    mask_ratio: float
    """Ratio of masked to all pixels."""
    steps: int | None
    """None: the server's own default."""
    n: int
    """Pictures that it asks for."""
    seed: int
    """Seed of its pictures, and of where its mask lies."""
    shape: MaskShape
    adapters: tuple[str, ...] = ()
    """Names of its LoRAs."""


@dataclass(frozen=True)
class Workload:
    """What requests are drawn from."""

    mask_ratios: Sequence[float]
    """Ratios at percentiles, the least first and the largest last, in equal distances; a fixed one twice."""
    steps: Mix | None
    """None: the server's own default."""
    images: Mix
    templates: Mix
    """Popularity by number."""
    shape: MaskShape
    adapters: AdapterWorkload | None = None
    """LoRAs of requests; None: no request has any."""


MAX_SEED = 2**31 - 1
"""The largest seed that every server takes."""


def draw(
    times: Sequence[float], workload: Workload, seed: int, *, independent: bool = False
) -> list[WorkloadRequest]:
    """A request at each of `times`, which ascend.

    Mask ratios, step counts and pictures follow their distributions even where requests are few: each is drawn from one
    of as many equal shares of its distribution as there are requests, paired and ordered by chance. Templates are drawn
    one by one. With `independent` everything is drawn one by one, so that runs differ as days do.
    """
    # times drawn with the same seed must not tell what is drawn here
    chance = random.Random(f"{seed} requests" if independent else seed)  # noqa: S311 - a workload, no secret
    ratios, steps, images = (
        [chance.random() for _ in times] if independent else _shares(len(times), chance) for _ in range(3)
    )
    adapters = [()] * len(times) if workload.adapters is None else workload.adapters.draw(times, seed)
    return [
        WorkloadRequest(
            at_s=at_s,
            template=chosen(workload.templates, chance.random()),
            mask_ratio=at_percentile(workload.mask_ratios, ratios[place]),
            steps=None if workload.steps is None else chosen(workload.steps, steps[place]),
            n=chosen(workload.images, images[place]),
            seed=chance.randint(0, MAX_SEED),
            shape=workload.shape,
            adapters=adapters[place],
        )
        for place, at_s in enumerate(times)
    ]


def faster(requests: Sequence[WorkloadRequest], speed: float) -> list[WorkloadRequest]:
    """The same requests, arriving `speed` times as fast."""
    return [replace(request, at_s=request.at_s / speed) for request in requests]


def _shares(count: int, chance: random.Random) -> list[float]:
    """One number from each of `count` equal parts of 0..1, in an order by chance."""
    shares = [(place + chance.random()) / count for place in range(count)]
    chance.shuffle(shares)
    return shares
