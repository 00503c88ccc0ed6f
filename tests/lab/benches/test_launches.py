"""What counts as a launch, and how many a step of the engine may have."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from giornata.packed.packing import TraceLane
from giornata_lab.bench import launches
from giornata_lab.bench.compute.batches import Batches, StepKind
from giornata_lab.bench.launches import Launches, counted
from giornata_lab.bench.options import rows_of

X = torch.ones(4, 6)
FEW = torch.tensor([2, 0])
X_BYTES, FEW_BYTES = 4 * 6 * 4, 2 * 8


def test_what_runs_on_another_device_is_not_counted_but_copies_to_it_are() -> None:
    with Launches("meta") as found:
        host = X + 1
        copy = host.to("meta")
        copy + copy
    assert found.count(TraceLane.COMPUTE) == 2


def test_loads_are_counted_apart() -> None:
    with Launches("cpu") as found:
        with found.span(TraceLane.COMPUTE, "block 0"):
            with found.span(TraceLane.LOAD, "block 0"):
                X + 1
            X * 2
        X * 3
    assert found.operations == {TraceLane.COMPUTE: {"mul": 2}, TraceLane.LOAD: {"add": 1}}


MOST = {
    (StepKind.FULL, 1): 695,
    (StepKind.FULL, 8): 818,
    (StepKind.MASKED, 1): 808,
    (StepKind.MASKED, 8): 924,
}
"""Operations of a step at FLUX.1-dev's depth, as a GPU would be asked for them. The aim of 900 of one masked row,
and 1,000 of eight, is reached: whoever needs fewer lowers these."""
LOADS = {(StepKind.LOADS, 1): 1368, (StepKind.CORRECTED, 1): 2508, (StepKind.FIRST, 1): 1368}
"""Operations of the loads in a step at FLUX.1-dev's depth."""
GIGABYTES = {(StepKind.FULL, 1): 84.5, (StepKind.MASKED, 1): 41.6, (StepKind.MASKED, 8): 213.0}
"""That the operations of a step read and write, pictures of 1024²."""


SMALL = {
    ("flux", StepKind.FULL): 166,
    ("flux", StepKind.MASKED): 189,
    ("flux2", StepKind.FULL): 221,
    ("flux2", StepKind.MASKED): 224,
    ("qwen-image-edit-plus", StepKind.FULL): 397,
    ("qwen-image-edit-plus", StepKind.MASKED): 396,
}
"""Operations of a step of one row of a small network; those that are driven have their own picture behind it."""


@cache
def batches(*flags: str) -> Batches:
    return Batches(rows_of(launches.options_of(flags)))


@cache
def step(kind: StepKind, rows: int) -> Launches:
    return counted(batches().prepared(kind, rows), "meta")


@pytest.mark.parametrize(("family", "kind"), SMALL)
def test_a_step_of_a_small_network_launches_no_more_than_today(family: str, kind: StepKind) -> None:
    """Also, nothing in it waits for the device: `meta` has no values to wait for."""
    flags = ("--family", family, "--model", "mid", "--tokens", "256", "--text", "16")
    found = counted(batches(*flags).prepared(kind, 1), "meta")
    assert found.count(TraceLane.LOAD) == 0
    assert 4 < found.count(TraceLane.COMPUTE) <= SMALL[family, kind]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "rows"), MOST)
def test_a_step_launches_no_more_than_today(kind: StepKind, rows: int) -> None:
    found = step(kind, rows)
    assert found.count(TraceLane.LOAD) == 0
    assert 57 < found.count(TraceLane.COMPUTE) <= MOST[kind, rows]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "rows"), LOADS)
def test_loads_launch_no_more_than_today(kind: StepKind, rows: int) -> None:
    assert 57 <= step(kind, rows).count(TraceLane.LOAD) <= LOADS[kind, rows]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "rows"), GIGABYTES)
def test_a_step_moves_no_more_than_today(kind: StepKind, rows: int) -> None:
    """At least the weights, which every step reads once."""
    assert 23.0 < step(kind, rows).moved_bytes[TraceLane.COMPUTE] / 1e9 <= GIGABYTES[kind, rows]
