"""Ways to make what ControlNets add, as the benchmark of pictures compares them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from giornata.packed.uses import Residuals
from giornata.scheduling.batch import RowKey
from giornata_denoiser.rows.row import Row
from tests.bench.adapters_quality import EACH, SERVED, WAYS, StepBefore
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec


class Made:
    """Residuals that tell whose they are; satisfies :class:`giornata.packed.uses.Residuals`."""

    whole = True

    def __init__(self, of: tuple[RowKey, int]) -> None:
        self.of = of

    def sample(self, block: int) -> Tensor | None:
        return None


class Making:
    """Makes them; satisfies :class:`giornata_denoiser.engine.controls.Controls`."""

    def __init__(self) -> None:
        self.kept: list[RowKey] = []

    def residuals(self, rows: Sequence[Row]) -> tuple[Residuals | None, ...]:
        return tuple(Made((row.key, row.step)) for row in rows)

    def retain(self, keys: Collection[RowKey]) -> None:
        self.kept = list(keys)


def rows_at(*steps: int) -> list[Row]:
    family = tiny_flux.family()
    return [
        replace(tiny_flux.row(family, Spec(str(index), steps=6)), step=step)
        for index, step in enumerate(steps)
    ]


def steps_of(found: Sequence[Residuals | None]) -> list[int]:
    return [made.of[1] for made in found if isinstance(made, Made)]


def test_a_row_gets_what_its_step_before_has_made() -> None:
    made = StepBefore(Making())
    assert steps_of(made.residuals(rows_at(0, 3))) == [0, 3], "the first step has no other"
    assert steps_of(made.residuals(rows_at(1, 4))) == [0, 3]
    assert steps_of(made.residuals(rows_at(2))) == [1]


def test_a_row_that_is_forgotten_begins_with_its_own() -> None:
    making = Making()
    made = StepBefore(making)
    first, second = rows_at(0, 0)
    made.residuals([first, second])
    made.retain([second.key])
    assert making.kept == [second.key]
    assert steps_of(made.residuals(rows_at(1, 1))) == [1, 0]


def test_what_denoisers_do_is_among_the_ways() -> None:
    assert {EACH, SERVED} <= WAYS.keys()
