"""The engine: a row fails, resumes and is cancelled alone, also where steps are judged one step late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.packed.packing import BlockInputs
from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.errors import InternalError, RowPoisoned, SchemaMismatch
from giornata.wire.models import Sampler
from giornata_denoiser.choices import EXACT
from giornata_denoiser.engine.batch_tensors import ControlLost, ControlPart
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.model_runner import FiniteCheck, StepReport
from giornata_denoiser.engine.slabs import WaitTimer
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.families.preview_map import PreviewMap
from giornata_denoiser.families.sampling import DiscreteTime
from giornata_denoiser.rows.row import Row, Snapshot
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import GRID, assert_nothing_kept, edit, finish_rows, finished, template
from tests.unit.denoiser.engine.test_masked import OF

ROOMY = Capacity(rows=8, tokens=10_000)
MIXED = [
    Spec("plain", grid=(3, 4), steps=4, seed=1),
    Spec("guided", grid=(4, 2), steps=6, true_cfg_scale=2.5, text_tokens=7, guidance_scale=1.0, seed=2),
    Spec("wide", grid=(2, 9), steps=3, text_tokens=3, seed=3),
    Spec("strength", grid=(3, 4), steps=8, strength=0.6, guidance_scale=30.0, seed=4),
    Spec("one step", grid=(1, 1), steps=1, text_tokens=1, seed=5),
    Spec("guided too", grid=(5, 5), steps=5, true_cfg_scale=4.0, seed=6),
]
"""Rows that differ in everything."""


def engine(of: ModelFamily, capacity: Capacity = ROOMY) -> Engine:
    ticks = count()
    return Engine(of, capacity, lambda: float(next(ticks)))


def reports(made: Engine) -> Iterator[StepReport]:
    while (report := made.step()) is not None:
        yield report
    assert_nothing_kept(made)


def alone(of: ModelFamily, spec: Spec) -> Tensor:
    return finish_rows(of, [tiny_flux.row(of, spec)])[spec.job_id].latent


def test_every_step_is_reported_with_its_sample() -> None:
    made = engine(OF)
    made.batch.submit(
        [tiny_flux.row(OF, Spec("a", steps=1)), tiny_flux.row(OF, Spec("b", steps=2, true_cfg_scale=2.0))]
    )
    first, second = reports(made)
    assert [(row.key.job_id, row.step, row.done) for row in first.advanced] == [
        ("a", 1, True),
        ("b", 1, False),
    ]
    assert [(row.key.job_id, row.step, row.done) for row in second.advanced] == [("b", 2, True)]
    assert first.sample is not None
    assert first.sample.model_dump(exclude={"assemble_ms", "step_ms", "predicted_ms"}) == {
        "rows": 2,
        "degree": 1,
        "halves": False,
        "sequences": 3,
        "image_tokens": 36,
        "text_tokens": 5 + 5 + 7,
        "projected_tokens": 0,
        "attention_pairs": 17**2 + 17**2 + 19**2,
        "calls": 1,
        "linear": OF.depth * OF.specs[0].linear * (17 + 17 + 19),
        "attention": OF.depth * OF.specs[0].pair * (17**2 + 17**2 + 19**2),
        "convolution": 0.0,
        "gathered": 0.0,
        "low_rank": 0.0,
        "segments": 0,
        "control": 0.0,
        "blocks": 3 * OF.depth,
        "skipped_blocks": 0,
        "loaded_bytes": 0,
        "waited_ms": 0.0,
        "controls_waited_ms": 0.0,
        "reusing_ms": 0.0,
        "excess_ms": 0.0,
    }
    assert 0 < first.sample.assemble_ms < first.sample.step_ms
    assert first.began_s < first.ended_s < second.began_s


def test_a_row_that_is_not_finite_fails_alone() -> None:
    made = engine(OF)
    poisoned = tiny_flux.row(OF, Spec("poisoned"))
    poisoned.inputs.conditioning["noise"][0, 0] = float("nan")
    made.batch.submit([tiny_flux.row(OF, MIXED[0]), replace(poisoned, latent=poisoned.latent * float("inf"))])
    first = present(made.step())
    assert [(failure.row.key.job_id, type(failure.error)) for failure in first.failed] == [
        ("poisoned", RowPoisoned)
    ]
    torch.testing.assert_close(finished(made)["plain"].latent, alone(OF, MIXED[0]), atol=1e-5, rtol=0)


class Choking(FluxInpaint):
    """A family that raises `error` whenever a batch has a latent with a marked value."""

    error: Exception = ValueError("a detail that must not leak")

    def model_input(self, latents: Tensor, conditioning: Sequence[Mapping[str, Tensor]]) -> Tensor:
        if (latents == MARK).any():
            raise self.error
        return super().model_input(latents, conditioning)


MARK = 12345.0


@pytest.mark.parametrize(
    ("cause", "kind"),
    [(ValueError("a detail"), RowPoisoned), (torch.OutOfMemoryError("a detail"), InternalError)],
)
def test_a_row_that_raises_fails_alone(cause: Exception, kind: type[Exception]) -> None:
    network = Choking(tiny_flux.transformer())
    network.error = cause
    of = tiny_flux.family(network)
    made = engine(of)
    culprit = tiny_flux.row(of, Spec("culprit"))
    made.batch.submit([tiny_flux.row(of, spec) for spec in MIXED[:2]])
    made.batch.submit([replace(culprit, latent=torch.full_like(culprit.latent, MARK))])
    first = present(made.step())
    assert [row.step for row in first.advanced] == [1, 1]
    assert first.sample is None
    (failure,) = first.failed
    assert failure.row.key.job_id == "culprit"
    assert type(failure.error) is kind
    assert failure.error.__cause__ is cause
    assert "detail" not in str(failure.error)
    torch.testing.assert_close(finished(made)["guided"].latent, alone(of, MIXED[1]), atol=1e-5, rtol=0)


def test_a_lost_device_is_nobodys_fault() -> None:
    network = Choking(tiny_flux.transformer())
    network.error = torch.AcceleratorError("the device is gone", 1)
    of = tiny_flux.family(network)
    made = engine(of)
    culprit = tiny_flux.row(of, Spec("culprit"))
    made.batch.submit([replace(culprit, latent=torch.full_like(culprit.latent, MARK))])
    with pytest.raises(torch.AcceleratorError):
        made.step()
    assert len(made.batch) == 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda text, _: text.pop("pooled_prompt_embeds"), "lacks the tensor pooled_prompt_embeds"),
        (lambda _, tensors: tensors.update(mask=torch.zeros(5, 64)), "The tensor mask has a wrong shape"),
        (
            lambda text, _: text.update({PROMPT_MASK: torch.ones(9)}),
            f"The tensor {PROMPT_MASK} has a wrong shape",
        ),
        (lambda text, _: text.update(prompt_embeds=torch.zeros(3, 7)), "Accepted: \\('any', 24\\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(spoil: object, message: str) -> None:
    text, tensors = tiny_flux.inputs(OF, Spec())
    assert callable(spoil)
    spoil(text, tensors)
    with pytest.raises(SchemaMismatch, match=message):
        build_row(
            OF,
            RowKey("job", 1, 0),
            grid=(3, 4),
            track=OF.schedule.track(sampler=OF.schedule.default_sampler, steps=4, strength=1.0, cells=12),
            text=text,
            conditioning=tensors,
            guidance_scale=3.5,
        )


def test_a_row_does_not_resume_beyond_its_end() -> None:
    snapshot = replace(tiny_flux.row(OF, Spec()).export(), step=4)
    with pytest.raises(SchemaMismatch, match="resumes at a step it does not have"):
        tiny_flux.row(OF, Spec(steps=4), resume=snapshot)


DISCRETE = DiscreteTime({"_class_name": "EulerDiscreteScheduler", "beta_schedule": "scaled_linear"})


def resumed(sampler: Sampler, *states: Tensor | None) -> Row:
    """A row after one of its steps, with the states that were kept of its sampler."""
    text, tensors = tiny_flux.inputs(OF, Spec())
    track = DISCRETE.track(sampler=sampler, steps=5, strength=1.0, cells=12)
    how: dict[str, Any] = {
        "grid": (3, 4),
        "track": track,
        "text": text,
        "conditioning": tensors,
        "guidance_scale": 3.5,
    }
    return build_row(OF, RowKey("job", 1, 0), resume=Snapshot(1, tensors["noise"], *states), **how)


@pytest.mark.parametrize(
    ("state", "received"),
    [
        (None, "none"),
        (torch.zeros(16, dtype=torch.uint8), r"\(16,\) torch.uint8"),
        (torch.Generator().get_state().float(), "float32"),
        (torch.full_like(torch.Generator().get_state(), 255), "other bytes"),
    ],
)
def test_what_is_no_state_of_a_generator_is_refused(state: Tensor | None, received: str) -> None:
    with pytest.raises(SchemaMismatch, match=received):
        resumed(Sampler.EULER_ANCESTRAL, None, state)


def test_a_row_does_not_go_on_without_what_its_sampler_remembers() -> None:
    with pytest.raises(SchemaMismatch, match="memory"):
        resumed(Sampler.DPMPP_2M)


def test_negative_prompt_without_scale_above_one_is_not_computed() -> None:
    row = tiny_flux.row(OF, Spec(true_cfg_scale=2.0))
    assert len(row.inputs.prompts) == 2
    assert len(row.shapes) == 2
    text, tensors = tiny_flux.inputs(OF, Spec(true_cfg_scale=2.0))
    plain = build_row(
        OF, row.key, grid=row.grid, track=row.track, text=text, conditioning=tensors, guidance_scale=3.5
    )
    assert len(plain.inputs.prompts) == 1


# A device that runs ahead of the host: steps are judged one step late, and nothing unjudged leaves the
# engine.


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


def judged_engine(of: ModelFamily, ahead: Ahead | None, show: PreviewMap | None = None) -> Engine:
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


def all_reports(made: Engine) -> list[StepReport]:
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
    made = judged_engine(OF, ahead)
    made.batch.submit([tiny_flux.row(OF, Spec("a", steps=4))])
    all_reports(made)
    inner = [("made", 0), ("made", 1), ("read", 0), ("made", 2), ("read", 1), ("made", 3), ("read", 2)]
    assert ahead.told == [*inner, ("read", 3)]


def test_latents_and_samples_are_those_of_an_engine_that_waits() -> None:
    rows = [tiny_flux.row(OF, Spec(name, steps=steps, seed=steps)) for name, steps in (("a", 3), ("b", 6))]
    found = []
    for ahead in (None, Ahead()):
        made = judged_engine(OF, ahead)
        made.batch.submit(rows)
        found.append(all_reports(made))
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
    alone = judged_engine(OF, None)
    alone.batch.submit([good])
    wanted = ended(all_reports(alone))["good"].latent
    made = judged_engine(OF, Ahead())
    made.batch.submit([good, bad])
    for _ in range(at_step):
        made.step()
    made.plan()
    poison(made, "bad")
    told = all_reports(made)
    assert failed(told) == [(0 if last else 1, "bad", at_step)]
    assert set(ended(told)) == {"good"}
    torch.testing.assert_close(ended(told)["good"].latent, wanted, atol=FLOAT32, rtol=0)


@pytest.mark.parametrize("at_step", [0, 1])
def test_a_poisoned_row_is_not_shown(at_step: int) -> None:
    made = judged_engine(OF, Ahead(), PreviewMap(torch.zeros(16, 3), torch.zeros(3)))
    rows = [tiny_flux.row(OF, Spec(name, steps=4, partial_images=1)) for name in ("good", "bad")]
    made.batch.submit(rows)
    for _ in range(at_step):
        made.step()
    made.plan()
    poison(made, "bad")
    told = all_reports(made)
    assert failed(told) == [(1 - at_step, "bad", at_step)]
    shown = [(preview.key.job_id, preview.step) for report in told for preview in report.previews]
    assert shown == [("good", 2)]


def test_nothing_of_a_poisoned_row_is_taught_or_handed_back() -> None:
    taken = template(OF)
    rows = [edit(OF, taken, Spec(name, grid=GRID, steps=5, seed=i)) for i, name in enumerate(("good", "bad"))]
    made = judged_engine(OF, Ahead())
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
    made = judged_engine(OF, Ahead())
    made.batch.submit([tiny_flux.row(OF, Spec("a", seed=1)), tiny_flux.row(OF, Spec("b", seed=2))])
    made.plan()
    poison(made, "a")
    made.step()
    made.batch.cancel("a")
    made.batch.submit([tiny_flux.row(OF, Spec("a", seed=3))])
    told = all_reports(made)
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
    samples = [report.sample for report in all_reports(made) if report.sample is not None]
    assert all(0.0 <= sample.step_ms <= 2000.0 for sample in samples), "with the next one's second"
    assert {sample.controls_waited_ms for sample in samples} == {0.0, 5000.0}
