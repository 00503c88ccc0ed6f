"""Ways to make what ControlNets add, as the benchmark of pictures compares them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor

from giornata.scheduling.batch import RowKey
from giornata_denoiser.blocks.waits import Waits
from giornata_denoiser.engine.controls import OfSequences
from giornata_denoiser.rows.row import Row
from tests.bench.adapters_quality import EACH, SERVED, WAYS, StepBefore
from tests.fakes import tiny_flux
from tests.fakes.tiny_flux import Spec

WAITS = Waits(lambda: 0.0)


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

    def able(self, row: Row) -> Row | None:
        return row if row.step else None

    def residuals(self, rows: Sequence[Row], whole: Sequence[bool], waits: Waits) -> tuple[OfSequences, ...]:
        assert waits is WAITS
        return tuple(
            (Made((row.key, row.step)),) if acts else () for row, acts in zip(rows, whole, strict=True)
        )

    def retain(self, keys: Collection[RowKey]) -> None:
        self.kept = list(keys)


def rows_at(*steps: int) -> list[Row]:
    family = tiny_flux.family()
    return [
        replace(tiny_flux.row(family, Spec(str(index), steps=6)), step=step)
        for index, step in enumerate(steps)
    ]


def steps_of(made: StepBefore, rows: Sequence[Row]) -> list[int]:
    found = made.residuals(rows, [True] * len(rows), WAITS)
    return [one.of[1] for added in found for one in added if isinstance(one, Made)]


def test_a_row_gets_what_its_step_before_has_made() -> None:
    made = StepBefore(Making())
    assert steps_of(made, rows_at(0, 3)) == [0, 3], "the first step has no other"
    assert steps_of(made, rows_at(1, 4)) == [0, 3]
    assert steps_of(made, rows_at(2)) == [1]


def test_a_row_that_is_forgotten_begins_with_its_own() -> None:
    making = Making()
    made = StepBefore(making)
    first, second = rows_at(0, 0)
    assert steps_of(made, [first, second]) == [0, 0]
    made.retain([second.key])
    assert making.kept == [second.key]
    assert steps_of(made, rows_at(1, 1)) == [1, 0]


def test_what_each_step_asks_of_a_row_is_asked_of_what_computes() -> None:
    made = StepBefore(Making())
    assert [made.able(row) is not None for row in rows_at(0, 1)] == [False, True]


def test_what_denoisers_do_is_among_the_ways() -> None:
    assert {EACH, SERVED} <= WAYS.keys()
