"""How rows enter steps: what of their last one is of use, and who has to let go of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from giornata.scheduling.degrees.pool import Devices, StepStart
from giornata.wire.jobs import Priority
from giornata_denoiser.pool.book import PoolState, RowStepStart, RowStepTimes
from giornata_denoiser.pool.memory import Arena
from giornata_denoiser.pool.shelf import SharedRowStore
from giornata_denoiser.rows.row import RecordingSpec, Row
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec
from tests.unit.denoiser.engine.edits import FORMS, GRID

PAIR = (0, 1)
Step = tuple[Devices, int, bool]
"""Devices, epoch of their group, and whether by halves."""


def entered(row: Row, steps: Sequence[Step]) -> RowStepStart:
    """How a row enters the last of these steps, once the others have ended."""
    book = PoolState(lambda _: RowStepTimes({}, {}, None))
    shared, held = SharedRowStore(Arena()).put(row)
    book.add(held, shared, 0.0)
    for devices, epoch, halves in steps:
        flight, (found,) = book.begin(
            StepStart((row.key,), devices), 0.0, epoch=epoch, halves=halves, seconds=1.0
        )
        list(book.settle(flight))
    return found


def test_a_rule_is_shown_what_a_job_has_been_promised() -> None:
    book = PoolState(lambda _: RowStepTimes({1: 1.0}, {1: 2.0}, None))
    row = tiny_flux.row(tiny_flux.family(), Spec(grid=GRID, steps=6))
    row = replace(row, due_s=9.0, priority=Priority.BATCH)
    shared, held = SharedRowStore(Arena()).put(row)
    book.add(held, shared, 4.0)
    (shown,) = book.shown(5.0)
    assert (shown.arrived_s, shown.due_s, shown.left) == (4.0, 9.0, 6)
    assert shown.priority is Priority.BATCH


@pytest.mark.parametrize(
    ("steps", "fresh", "left"),
    [
        ([(PAIR, 1, False)], True, set()),
        ([(PAIR, 1, False)] * 2, False, set()),
        ([(PAIR, 1, False), (PAIR, 2, False)], True, set()),
        ([(PAIR, 1, False), (PAIR, 1, True)], True, set()),
        ([(PAIR, 1, True), ((1, 2), 3, True)], True, {0}),
        ([(PAIR, 1, False), ((3,), 4, False)], True, {0, 1}),
    ],
    ids=["first", "stays", "another group", "another way", "one stays", "both left"],
)
def test_a_row_goes_on_where_devices_group_and_way_stay(
    steps: list[Step], fresh: bool, left: set[int]
) -> None:
    found = entered(tiny_flux.row(tiny_flux.family(), Spec(grid=GRID, steps=6)), steps)
    assert (found.fresh, set(found.left)) == (fresh, left)


@pytest.mark.parametrize(("devices", "leaves"), [((0,), True), (PAIR, False)])
def test_a_row_leaves_nothing_once_a_group_has_computed_a_step(devices: Devices, leaves: bool) -> None:
    row = tiny_flux.row(tiny_flux.family(), Spec(grid=GRID, steps=6))
    row = replace(row, records=RecordingSpec(FORMS[0], 0, name="first"))
    found = entered(row, [((0,), 1, False), (devices, 2, False), ((0,), 1, False)])
    assert (found.held.row.records is not None) == leaves
