"""Steps that take turns on cores of their own or on one, and which of them others have disturbed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from giornata_lab.bench.systems import cores

Step = Callable[[], float]
"""Makes a step; returns for how many milliseconds it waited for ControlNets."""
FEWEST: Final = 2
"""Undisturbed pairs; with fewer, all of them count."""


class TurnSetting(StrEnum):
    """Who computes ControlNets, and where."""

    NONE = "none"
    BESIDE = "none, other core busy"
    HERE = "here"
    OWN = "service, own core"
    SHARED = "service, one core"
    DIFFUSERS_NONE = "diffusers, none"
    DIFFUSERS = "diffusers"


class TurnTimes(NamedTuple):
    """One measurement."""

    ms: float
    """Time of a step."""
    waited_ms: float
    """How long a step waits for samples."""
    others: float
    """Share of the time in which others had the cores that it used."""
    mine_ms: float
    """Processor time of a step in this process."""
    service_ms: float
    """Processor time of a step in the service."""


Pair = tuple[TurnTimes, TurnTimes]
"""With what it is divided by, of one turn."""


@dataclass(frozen=True)
class Turns:
    """Measures settings in turns.

    Args:
        service: its process id.
        beside: computes on another core.
        steps: that one measurement has.
        disturbed: share of others above which a measurement does not count.
    """

    service: int
    beside: cores.Neighbour
    steps: int
    disturbed: float

    def place(self, setting: TurnSetting) -> None:
        """Put both processes on their cores."""
        first, *others = range(os.cpu_count() or 1)
        if setting is TurnSetting.OWN and not others:
            raise SystemExit("a core for each process needs a machine with two")
        cores.pin(os.getpid(), [first])
        cores.pin(self.service, others[:1] if setting is TurnSetting.OWN else [first])

    async def measured(
        self, steps: Mapping[TurnSetting, Step], repeats: int, most: int
    ) -> dict[TurnSetting, list[Pair]]:
        """By setting, pairs with what it is divided by, of one turn each.

        Turns go on until so many pairs of each are undisturbed; there are `most` of them.
        """
        pairs: dict[TurnSetting, list[Pair]] = {setting: [] for setting in steps}
        for _ in range(most):
            turn = {setting: await self.timed(setting, step) for setting, step in steps.items()}
            for setting, taken in turn.items():
                diffusers = setting in {TurnSetting.DIFFUSERS, TurnSetting.DIFFUSERS_NONE}
                base = turn[TurnSetting.DIFFUSERS_NONE if diffusers else TurnSetting.NONE]
                pairs[setting].append((taken, base))
            if all(len(self.quiet(found)) >= repeats for found in pairs.values()):
                break
        return pairs

    async def timed(self, setting: TurnSetting, step: Step) -> TurnTimes:
        """One measurement, in a thread beside the event loop, as an engine's is."""
        self.place(setting)
        if setting is TurnSetting.BESIDE:
            self.beside.go_on()
        try:
            return await asyncio.to_thread(self._timed, setting, step)
        finally:
            self.beside.rest()

    def quiet(self, pairs: Sequence[Pair]) -> list[Pair]:
        """Return those that others have not disturbed."""
        return [pair for pair in pairs if max(each.others for each in pair) <= self.disturbed]

    def counting(self, pairs: Sequence[Pair]) -> Sequence[Pair]:
        """Return those that count."""
        quiet = self.quiet(pairs)
        return quiet if len(quiet) >= FEWEST else pairs

    def _timed(self, setting: TurnSetting, step: Step) -> TurnTimes:
        processes = (os.getpid(), self.service)
        before = {process: cores.spent(process) for process in processes}
        began = time.perf_counter()
        waited_ms = sum(step() for _ in range(self.steps))
        took_s = time.perf_counter() - began
        had = [cores.since(then, cores.spent(process)) for process, then in before.items()]
        if setting is TurnSetting.OWN:  # what threads of one process take from each other does not count
            lost = (busiest.delayed_s - sum(each.ran_s for each in rest) for busiest, *rest in had)
            others_s = max(0.0, *lost)
        else:  # on one core, one of all threads runs all the time
            others_s = took_s - sum(each.ran_s for threads in had for each in threads)
        mine_ms, service_ms = (sum(each.ran_s for each in threads) * 1e3 / self.steps for threads in had)
        return TurnTimes(
            took_s * 1e3 / self.steps, waited_ms / self.steps, others_s / took_s, mine_ms, service_ms
        )


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Step time of each pair's first over its second's."""
    return [taken.ms / base.ms for taken, base in pairs]
