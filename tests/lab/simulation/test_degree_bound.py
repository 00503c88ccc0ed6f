"""The bound on deadlines that a pool can keep, and packing against it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import product

import pytest

from giornata.scheduling.degrees.plans import (
    FreeDeviceSpans,
    PackingOption,
    PackingRequest,
    degree_frontier,
    pack_deadlines,
)
from giornata.scheduling.degrees.pool import DEGREES, Times
from giornata_lab.simulation.degrees.bound import FluidTask, most_in_time
from giornata_lab.simulation.degrees.step_times import eager_s

DEVICES = 8
PICTURES = [
    {degree: eager_s(degree, (side / 16) ** 2) for degree in DEGREES} for side in (256, 512, 1024, 2048)
]
LINEAR = {degree: 8 / degree for degree in DEGREES}
"""Seconds of a step whose device-time no degree lengthens."""
FLAT = {1: 1.0}


def task(due_s: float, steps: int, step_s: Times, arrived_s: float = 0.0) -> FluidTask:
    return FluidTask(arrived_s, due_s, steps, step_s)


def contested(chance: random.Random, count: int, slack: float) -> list[FluidTask]:
    """Tasks that are all here; alone each would be in time."""
    found = []
    for _ in range(count):
        times, steps = chance.choice(PICTURES), chance.randint(5, 50)
        due_s = steps * min(times.values()) * chance.uniform(1, slack) + chance.uniform(0, 0.5)
        found.append(task(due_s, steps, times))
    return found


def promised(tasks: list[FluidTask]) -> int:
    wishes = []
    for key, each in enumerate(tasks):
        ladder = degree_frontier(each.step_s, DEVICES)
        work_s = each.steps * ladder.work_s
        wishes.append(
            PackingRequest(key, each.arrived_s, each.due_s, (PackingOption(each.steps, ladder),), work_s)
        )
    return len(pack_deadlines(wishes, FreeDeviceSpans.of(0.0, DEVICES, [])))


def test_a_task_that_the_widest_degree_cannot_end_in_time_does_not_count() -> None:
    assert most_in_time([task(9.9, 10, LINEAR)], DEVICES) == 0
    assert most_in_time([task(10.0, 10, LINEAR)], DEVICES) == 1


def test_tasks_that_need_all_devices_at_once_exclude_each_other() -> None:
    assert most_in_time([task(10.0, 10, LINEAR), task(10.0, 10, LINEAR)], DEVICES) == 1
    assert most_in_time([task(20.0, 10, LINEAR), task(20.0, 10, LINEAR)], DEVICES) == 2


def test_one_task_has_one_degree_at_a_time() -> None:
    """Eight devices of degree 1 make no step faster, though their device-time would suffice."""
    assert most_in_time([task(4.0, 5, FLAT), task(9.0, 5, FLAT)], DEVICES) == 1


def test_a_task_is_not_computed_before_it_arrives() -> None:
    early, late = task(10.0, 10, LINEAR), task(19.0, 10, LINEAR, arrived_s=9.0)
    assert most_in_time([early, late], DEVICES) == 1
    assert most_in_time([early, replace(late, due_s=20.0)], DEVICES) == 2


def test_more_devices_keep_no_fewer() -> None:
    tasks = contested(random.Random(4), 6, 2.0)  # noqa: S311 - a workload
    kept = [most_in_time(tasks, devices) for devices in range(1, 9)]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]


def test_a_task_without_deadline_is_refused() -> None:
    with pytest.raises(ValueError, match="received due_s=inf"):
        most_in_time([task(math.inf, 1, FLAT)], DEVICES)


def test_packing_promises_nearly_as_many_deadlines_as_there_are_and_never_more() -> None:
    chance, exact, packed = random.Random(3), 0, 0  # noqa: S311 - a workload
    for count, slack, _ in product((3, 5, 7), (2.5, 4.0), range(8)):
        tasks = contested(chance, count, slack)
        best, ours = most_in_time(tasks, DEVICES), promised(tasks)
        assert ours <= best
        exact += best
        packed += ours
    assert packed >= 0.98 * exact
    assert exact < sum((3, 5, 7)) * 16, "the cases are contested"
