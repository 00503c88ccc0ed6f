"""The engine: a row does not depend on who shares its batch, and fails, resumes and is cancelled alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.errors import InternalError, RowPoisoned, SchemaMismatch
from giornata.wire.models import Sampler
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.engine.model_runner import StepReport
from giornata_denoiser.families.flux import FluxInpaint
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.families.sampling import DiscreteTime
from giornata_denoiser.rows.row import Row, Snapshot
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.present import present
from tests.unit.denoiser.engine.edits import assert_nothing_kept, finish_rows, finished
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
