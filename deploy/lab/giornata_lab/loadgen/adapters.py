"""Which LoRAs requests ask for: popular by Zipf's law, repeated, and not the same ones for ever. Pure."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import exp, log
from typing import Final

from giornata_lab.loadgen import facts
from giornata_lab.loadgen.distributions import Mix, chosen, zipf

LATEST: Final = 8
"""Uses that one may repeat."""
DRIFTING: Final = 0.2
"""Share of the ranks that change at a time."""


@dataclass(frozen=True)
class AdapterSizes:
    """Sizes in bytes, from `least` to `most` with evenly spread logarithms, or of `listed` where that is not empty."""

    least: float = 0.0
    most: float = 0.0
    listed: tuple[int, ...] = tuple(facts.LORA_BYTES)

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
    count: int = facts.LORAS
    """Distinct ones."""
    zipf: float = facts.LORA_ZIPF
    """Exponent of their popularity."""
    repetition: float = 0.0
    """Share of uses that repeat one of the latest :data:`LATEST`."""
    drift_s: float = 0.0
    """After so many seconds each time a fifth of the ranks change places; 0: never."""
    names: tuple[str, ...] = ()
    """Theirs, instead of made-up ones; the first is the most popular one at the start."""

    @classmethod
    def of(cls, service: str, count: int = facts.LORAS) -> AdapterWorkload:
        """That of one of :data:`giornata_lab.loadgen.facts.ADAPTERS`, with so many distinct LoRAs."""
        return cls(facts.ADAPTERS[service]["loras"], count)

    def name(self, number: int) -> str:
        """The name of an adapter by its number."""
        return self.names[number] if self.names else lora_name(number)

    def draw(self, times: Sequence[float], seed: int) -> list[tuple[str, ...]]:
        """Adapters of a request at each of `times`, which ascend; equal seeds draw equal ones."""
        drawing = _AdapterSampler(self, seed)
        return [drawing.at(at_s) for at_s in times]


def lora_name(number: int) -> str:
    """What a made-up LoRA is called that has this rank at the start."""
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
