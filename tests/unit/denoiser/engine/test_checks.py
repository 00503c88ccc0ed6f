"""A device that runs ahead of the host: steps are judged one step late, and nothing unjudged leaves the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count

import pytest
import torch
from torch import Tensor

from giornata.packed.packing import BlockInputs
from giornata.scheduling.batch import Capacity
from giornata.wire.errors import RowPoisoned
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.batch_tensors import ControlLost, ControlPart
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.model_runner import FiniteCheck, StepReport
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, assert_nothing_kept, edit, template
from tests.unit.denoiser.engine.test_masked import OF

FLOAT32 = 1e-5


class Ahead:
    """Makes verdicts that have to be waited for, and writes down when they are made and read."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        self._numbers = count()

    def __call__(self, latents: Sequence[Tensor]) -> FiniteCheck:
        told, number = self.told, next(self._numbers)

        class Late(FiniteCheck):
            late = True

            def read(self) -> list[bool]:
                if ("read", number) not in told:
                    told.append(("read", number))
                return super().read()

        told.append(("made", number))
        return Late(latents)


def engine(of: ModelFamily, ahead: Ahead | None, show: PreviewMap | None = None) -> Engine:
    ticks = count()
    return Engine(
        of,
        Capacity(8, 10_000),
        lambda: float(next(ticks)),
        show,
        judge=ahead,
        reusing=ReuseOptions(correction_bits=EXACT),
    )


def poison(made: Engine, name: str) -> Row:
    """Spoil what the last step has made of a row."""
    (row,) = (row for row in (*made.batch.running, *made.batch.waiting) if row.key.job_id == name)
    made.plan()
    made.batch.settle([replace(row, latent=torch.full_like(row.latent, float("nan")))], [])
    return row


def reports(made: Engine) -> list[StepReport]:
    told = list(iter(made.step, None))
    assert_nothing_kept(made)
    return told


def ended(told: Sequence[StepReport]) -> dict[str, Row]:
    return {row.key.job_id: row for report in told for row in report.advanced if row.done}


def failed(told: Sequence[StepReport]) -> list[tuple[int, str, int]]:
    """Number of the report, name, and the step that the row goes back to."""
    found = [(number, failure) for number, report in enumerate(told) for failure in report.failed]
    assert all(type(failure.error) is RowPoisoned for _, failure in found)
    return [(number, failure.row.key.job_id, failure.row.step) for number, failure in found]


def test_a_step_is_given_before_the_one_before_is_judged() -> None:
    ahead = Ahead()
    made = engine(OF, ahead)
    made.batch.submit([tiny_flux.row(OF, Spec("a", steps=4))])
    reports(made)
    inner = [("made", 0), ("made", 1), ("read", 0), ("made", 2), ("read", 1), ("made", 3), ("read", 2)]
    assert ahead.told == [*inner, ("read", 3)]


def test_latents_and_samples_are_those_of_an_engine_that_waits() -> None:
    rows = [tiny_flux.row(OF, Spec(name, steps=steps, seed=steps)) for name, steps in (("a", 3), ("b", 6))]
    found = []
    for ahead in (None, Ahead()):
        made = engine(OF, ahead)
        made.batch.submit(rows)
        found.append(reports(made))
    calm, late = found
    assert all(torch.equal(ended(calm)[name].latent, ended(late)[name].latent) for name in "ab")
    assert [report.sample is None for report in calm] == [False] * 6
    # The third step ends with "a", and is waited for; so is the last one.
    assert [report.sample is None for report in late] == [True, False, False, True, False, False]
    of_last = [each.sample.image_tokens for each in (calm[-1], late[-1]) if each.sample is not None]
    assert of_last == [12, 12]


@pytest.mark.parametrize(("at_step", "last"), [(0, False), (2, False), (3, True)])
def test_a_poisoned_row_fails_alone_and_its_last_good_step_is_known(at_step: int, last: bool) -> None:
    good, bad = (tiny_flux.row(OF, Spec(name, steps=4, seed=i)) for i, name in enumerate(("good", "bad")))
    alone = engine(OF, None)
    alone.batch.submit([good])
    wanted = ended(reports(alone))["good"].latent
    made = engine(OF, Ahead())
    made.batch.submit([good, bad])
    for _ in range(at_step):
        made.step()
    made.plan()
    poison(made, "bad")
    told = reports(made)
    assert failed(told) == [(0 if last else 1, "bad", at_step)]
    assert set(ended(told)) == {"good"}
    torch.testing.assert_close(ended(told)["good"].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("at_step", [0, 1])
def test_a_poisoned_row_is_not_shown(at_step: int) -> None:
    made = engine(OF, Ahead(), PreviewMap(torch.zeros(16, 3), torch.zeros(3)))
    rows = [tiny_flux.row(OF, Spec(name, steps=4, partial_images=1)) for name in ("good", "bad")]
    made.batch.submit(rows)
    for _ in range(at_step):
        made.step()
    made.plan()
    poison(made, "bad")
    told = reports(made)
    assert failed(told) == [(1 - at_step, "bad", at_step)]
    shown = [(preview.key.job_id, preview.step) for report in told for preview in report.previews]
    assert shown == [("good", 2)]


def test_nothing_of_a_poisoned_row_is_taught_or_handed_back() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(name, grid=GRID, steps=5, seed=i)) for i, name in enumerate(("good", "bad"))]
    made = engine(OF, Ahead())
    made.batch.submit(rows)
    made.plan()
    poison(made, "bad")
    first = present(made.step())
    assert [failure.row.key.job_id for failure in first.failed] == ["bad"], (
        "a step that teaches is judged at once"
    )
    assert [row.reuse.taught for row in first.advanced] == [True]
    made.step()
    poison(made, "good")
    made.step()
    (handed_back,) = made.batch.take_all()
    with pytest.raises(RowPoisoned):
        handed_back.export()


def test_another_row_of_its_name_is_not_blamed() -> None:
    made = engine(OF, Ahead())
    made.batch.submit([tiny_flux.row(OF, Spec("a", seed=1)), tiny_flux.row(OF, Spec("b", seed=2))])
    made.plan()
    poison(made, "a")
    made.step()
    made.batch.cancel("a")
    made.batch.submit([tiny_flux.row(OF, Spec("a", seed=3))])
    told = reports(made)
    assert failed(told) == []
    assert set(ended(told)) == {"a", "b"}


@dataclass
class Losing(ControlPart):
    """Loses a row's ControlNets in the steps that a test names."""

    lost_in: int
    asked: int = 0

    def add(
        self, rows: Sequence[Row], uses: tuple[BlockInputs, ...], waits: WaitTimer
    ) -> tuple[BlockInputs, ...]:
        self.asked += 1
        if self.asked == self.lost_in:
            raise ControlLost({rows[0].key})
        return super().add(rows, uses, waits)


def test_a_step_that_is_lost_makes_the_one_before_it_no_longer() -> None:
    """It may have waited for seconds, and nobody knows when the device had ended the one before."""
    now = 0.0
    made = Engine(OF, Capacity(8, 10_000), lambda: now, judge=Ahead(), controls=Losing(lost_in=3))
    made.batch.submit([tiny_flux.row(OF, Spec(steps=5))])
    told: list[StepReport | None] = []
    while made.batch.running or made.batch.waiting:
        now += 1.0 if made.batch.running and len(told) == 2 else 0.001
        told.append(made.step())
    samples = [report.sample for report in told if report is not None and report.sample is not None]
    assert [report is not None and not report.advanced for report in told] == [
        False,
        False,
        True,
        False,
        False,
        False,
    ]
    assert len(samples) == 3, "of the first step, and of the two after it"
    assert max(sample.step_ms for sample in samples) < 100


class Waiting(ControlPart):
    """Every other step waits for samples for five seconds; each takes one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._steps = count()

    def add(
        self, rows: Sequence[Row], uses: tuple[BlockInputs, ...], waits: WaitTimer
    ) -> tuple[BlockInputs, ...]:
        self.now += 1.0
        if next(self._steps) % 2:
            with waits.waiting():
                self.now += 5.0
        return super().add(rows, uses, waits)


@pytest.mark.parametrize("ahead", [None, Ahead()])
def test_what_a_step_waits_for_controlnets_is_in_no_steps_time(ahead: Ahead | None) -> None:
    """Steps that take held samples wait for none. A step is judged when the next one's host has waited already."""
    controls = Waiting()
    made = Engine(OF, Capacity(8, 10_000), lambda: controls.now, judge=ahead, controls=controls)
    made.batch.submit([tiny_flux.row(OF, Spec(steps=6))])
    samples = [report.sample for report in reports(made) if report.sample is not None]
    assert all(0.0 <= sample.step_ms <= 2000.0 for sample in samples), "with the next one's second"
    assert {sample.controls_waited_ms for sample in samples} == {0.0, 5000.0}
