"""Which edits are asked for, when, and with which LoRAs: as in production, or fixed. Pure."""

from __future__ import annotations

import json
import random
from bisect import bisect, bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate, chain
from math import exp, log
from pathlib import Path
from typing import Any, Final

Mix = Mapping[int, float]
"""Weights by value; they need not sum to 1."""


def at_percentile(table: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of a distribution lies; straight lines between those of `table`."""
    place = share * (len(table) - 1)
    lower = min(int(place), len(table) - 2)
    return table[lower] + (place - lower) * (table[lower + 1] - table[lower])


def chosen(mix: Mix, share: float) -> int:
    """The value of `mix` at `share` (0..1) of its weight, values in ascending order."""
    values = sorted(mix)
    sums = list(accumulate(mix[value] for value in values))
    return values[min(bisect(sums, share * sums[-1]), len(values) - 1)]


def zipf(count: int, exponent: float) -> Mix:
    """Popularity of `count` templates: the weight of number i is (i + 1)^-exponent."""
    return {index: exp(-exponent * log(index + 1)) for index in range(count)}


def arrival_times(rate: float, seconds: float, seed: int, cv: float = 1.0) -> list[float]:
    """Times below `seconds` of a renewal process of `rate` a second.

    The times between arrivals follow a gamma distribution: a Poisson process where its coefficient of variation `cv` is
    1, bursts above, evenly spaced at 0.

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


@dataclass(frozen=True)
class ArrivalBursts:
    """Times in which requests are `factor` times as dense: each lasts `lasts_s`, `every_s` passes to the next one."""

    factor: float = 5.0
    lasts_s: float = 45.0
    every_s: float = 900.0
    """On average, from the end of one to the next one's start; exponentially distributed."""


def crowded_times(rate: float, seconds: float, seed: int, crowds: ArrivalBursts) -> list[float]:
    """Times below `seconds` of a Poisson process that is denser in crowds; `rate` a second is its mean over all.

    Raises:
        ValueError: `rate`, or what `crowds` say, is out of range.
    """
    if crowds.factor < 1 or crowds.lasts_s <= 0 or crowds.every_s <= 0:
        raise ValueError(f"a crowd has a factor of 1 or more and lasts longer than 0; received {crowds}")
    chance = random.Random(f"{seed} crowds")  # noqa: S311 - a workload, no secret
    usual = rate / (1 + (crowds.factor - 1) * crowds.lasts_s / (crowds.lasts_s + crowds.every_s))
    starts, at_s = list[float](), chance.expovariate(1 / crowds.every_s)
    while at_s < seconds:
        starts.append(at_s)
        at_s += crowds.lasts_s + chance.expovariate(1 / crowds.every_s)

    def dense(now: float) -> bool:
        place = bisect(starts, now)
        return place > 0 and now < starts[place - 1] + crowds.lasts_s

    times = arrival_times(usual * crowds.factor, seconds, seed)
    return [now for now in times if dense(now) or chance.random() < 1 / crowds.factor]


# What is known of edits in production. Pure; the figures are in ``workload_facts.json``, with their source.


FACTS: Final[Mapping[str, Any]] = json.loads(
    Path(__file__).with_name("workload_facts.json").read_text(encoding="utf-8")
)
MASK_RATIOS: Final[Mapping[str, Sequence[float]]] = {
    **FACTS["mask_ratio_percentiles"],
    "mixed": sorted(chain.from_iterable(FACTS["mask_ratio_percentiles"].values())),
}
"""The ratio of masked to all pixels at equal distances from 0 to 100 %, by trace; `mixed` is all of them together."""
STEPS: Final[Mix] = {int(steps): weight for steps, weight in FACTS["steps"].items()}
"""Denoising steps of a request."""
IMAGES: Final[Mix] = {int(images): weight for images, weight in FACTS["images_per_request"].items()}
"""Pictures that a request asks for."""
ZIPF: Final = float(FACTS["template_zipf_exponent"])
"""Exponent of the popularity of templates."""
BURSTS: Final = float(FACTS["inter_arrival_cv"])
"""Coefficient of variation of inter-arrival times; a Poisson process has 1."""
_ADAPTERS: Final[Mapping[str, Any]] = FACTS["adapters"]
ADAPTERS: Final[Mapping[str, Mapping[str, Mix]]] = {
    service: {kind: {int(number): share for number, share in mix.items()} for kind, mix in told.items()}
    for service, told in _ADAPTERS["services"].items()
}
"""By service: how many `loras` and `controlnets` a request has."""
LORAS: Final = int(_ADAPTERS["lora_count"])
"""Distinct LoRAs."""
LORA_ZIPF: Final = float(_ADAPTERS["lora_zipf_exponent"])
"""Exponent of their popularity."""
LORA_BYTES: Final[Sequence[int]] = _ADAPTERS["lora_bytes"]
"""Sizes of LoRAs."""


def controlnets() -> Mix:
    """Popularity of ControlNets by number: a few serve nearly all requests, and each of these as many."""
    count, (most_used, share) = _ADAPTERS["controlnet_count"], _ADAPTERS["controlnet_most_used"]
    rest = (1 - share) / (count - most_used)
    return {number: share / most_used if number < most_used else rest for number in range(count)}


LATEST: Final = 8
"""Uses that one may repeat."""
DRIFTING: Final = 0.2
"""Share of the ranks that change at a time."""


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes in bytes, from `least` to `most` with evenly spread logarithms, or of `listed` where that is not empty."""

    least: float = 0.0
    most: float = 0.0
    listed: tuple[int, ...] = tuple(LORA_BYTES)

    @classmethod
    def between(cls, least: float, most: float) -> AdapterSizes:
        """From `least` to `most` bytes.

        Raises:
            ValueError: the least is below 1, or above the most.
        """
        if not 1 <= least <= most:
            raise ValueError(
                f"received sizes from {least:g} to {most:g} bytes; accepted are 1 <= least <= most"
            )
        return cls(least, most, ())

    def of(self, name: str, seed: int) -> int:
        """Bytes of the adapter of this name; the same for equal seeds."""
        chance = random.Random(f"{seed} {name} bytes")  # noqa: S311 - a workload, no secret
        if self.listed:
            return chance.choice(self.listed)
        return round(exp(chance.uniform(log(self.least), log(self.most))))


@dataclass(frozen=True)
class AdapterWorkload:
    """What requests ask for."""

    numbers: Mix = field(default_factory=lambda: {0: 1.0})
    """Number of LoRAs of a request, each once."""
    count: int = LORAS
    """Distinct ones."""
    zipf: float = LORA_ZIPF
    """Exponent of their popularity."""
    repetition: float = 0.0
    """Share of uses that repeat one of the latest :data:`LATEST`."""
    drift_s: float = 0.0
    """After so many seconds each time a fifth of the ranks change places; 0: never."""
    names: tuple[str, ...] = ()
    """Theirs, instead of made-up ones; the first is the most popular one at the start."""

    @classmethod
    def of(cls, service: str, count: int = LORAS) -> AdapterWorkload:
        """That of one of :data:`giornata_lab.loadgen.workload.ADAPTERS`, with so many distinct LoRAs."""
        return cls(ADAPTERS[service]["loras"], count)

    def name(self, number: int) -> str:
        """The name of an adapter by its number."""
        return self.names[number] if self.names else lora_name(number)

    def draw(self, times: Sequence[float], seed: int) -> list[tuple[str, ...]]:
        """Adapters of a request at each of `times`, which ascend; equal seeds draw equal ones."""
        drawing = _AdapterSampler(self, seed)
        return [drawing.at(at_s) for at_s in times]


def lora_name(number: int) -> str:
    """Return what a made-up LoRA is called that has this rank at the start."""
    return f"lora{number}"


class _AdapterSampler:
    """One run's draws, in the order of their times."""

    def __init__(self, workload: AdapterWorkload, seed: int) -> None:
        self._workload = workload
        self._chance = random.Random(f"{seed} adapters")  # noqa: S311 - a workload, no secret
        self._count = len(workload.names) or workload.count
        self._order = list(range(self._count))
        """Adapters by rank."""
        self._sums = list(accumulate(zipf(self._count, workload.zipf).values()))
        self._latest = deque[int](maxlen=LATEST)
        self._shifts_s = workload.drift_s

    def at(self, now: float) -> tuple[str, ...]:
        while self._workload.drift_s and now > self._shifts_s:
            self._shifts_s += self._workload.drift_s
            self._drift()
        number = min(chosen(self._workload.numbers, self._chance.random()), self._count)
        found: dict[int, None] = {}
        while len(found) < number:
            # a repeated one that this request has already is drawn again, which must end where none is left
            found[self._one(repeats=len(found) < len({*self._latest}))] = None
        self._latest.extend(found)
        return tuple(map(self._workload.name, found))

    def _one(self, *, repeats: bool) -> int:
        if repeats and self._latest and self._chance.random() < self._workload.repetition:
            return self._chance.choice(self._latest)
        return self._order[bisect_left(self._sums, self._chance.random() * self._sums[-1])]

    def _drift(self) -> None:
        ranks = self._chance.sample(range(self._count), round(DRIFTING * self._count))
        moved = [self._order[rank] for rank in ranks]
        self._chance.shuffle(moved)
        for rank, adapter in zip(ranks, moved, strict=True):
            self._order[rank] = adapter


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


def draw(times: Sequence[float], workload: Workload, seed: int) -> list[WorkloadRequest]:
    """A request at each of `times`, which ascend.

    Mask ratios, step counts and pictures follow their distributions even where requests are few: each is drawn from one
    of as many equal shares of its distribution as there are requests, paired and ordered by chance. Templates are drawn
    one by one.
    """
    chance = random.Random(seed)  # noqa: S311 - a workload, no secret
    ratios, steps, images = (_shares(len(times), chance) for _ in range(3))
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
