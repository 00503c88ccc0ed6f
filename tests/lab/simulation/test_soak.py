"""An hour of constant load, on the virtual clock: what the router and the workers keep does not grow."""

from __future__ import annotations

import gc
import sys
from dataclasses import dataclass, field
from statistics import fmean
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Final

import pytest

from giornata.scheduling.placement import Placement
from giornata.scheduling.queue import RowQueue
from giornata.scheduling.scheduler import Scheduler, SchedulingDecision
from giornata_lab.loadgen import workload
from giornata_lab.loadgen.workload import MaskShape, Workload, zipf
from giornata_lab.simulation.jobs import template_name
from giornata_lab.simulation.machines import h800_flux
from giornata_lab.simulation.options import RunOptions
from giornata_lab.simulation.residency import TemplateSetting
from giornata_lab.simulation.scenario import ArrivalSetting, Scenario

HOUR_S: Final = 3600.0
SHARED: Final = (ModuleType, type, FunctionType, MethodType, BuiltinFunctionType)


def kept_bytes(*roots: object) -> int:
    """Bytes of everything that can be reached from `roots`, but for code."""
    seen, todo, total = set[int](), list(roots), 0
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, SHARED):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        todo += gc.get_referents(one)
    return total


@dataclass
class Watching:
    """Serves as `serves`, and weighs line and placement every minute."""

    serves: Scheduler
    weights: list[int] = field(default_factory=list)

    def decide(self, line: RowQueue, placement: Placement, now: float) -> SchedulingDecision:
        """See :class:`Scheduler`."""
        if now >= 60.0 * len(self.weights):
            self.weights.append(kept_bytes(line, placement))
        return self.serves.decide(line, placement, now)


@pytest.mark.long
def test_memory_and_lines_are_flat_over_an_hour_of_constant_load() -> None:
    templates = zipf(50, workload.ZIPF)
    work = Workload(
        workload.MASK_RATIOS["production"], workload.STEPS, workload.IMAGES, templates, MaskShape.SQUARE
    )
    kept = TemplateSetting(preloaded=tuple(map(template_name, templates)))
    soak = Scenario((h800_flux(),) * 2, work, ArrivalSetting(HOUR_S, 0.0), templates=kept)
    options = RunOptions()
    watching = Watching(options.scheduler())
    run = soak.run(soak.jobs(0.3, 1), options, scheduler=watching)
    thirds = len(watching.weights) // 3
    assert thirds >= 19
    assert fmean(watching.weights[-thirds:]) <= 1.05 * fmean(watching.weights[thirds : 2 * thirds])
    waiting = [moment.unfinished for moment in run.moments if moment.at_s < HOUR_S]
    middle, last = (waiting[place : place + 1200] for place in (1200, 2400))
    assert sum(last) <= 2 * sum(middle)
    assert min(waiting[-600:]) <= 1
