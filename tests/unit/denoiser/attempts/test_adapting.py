"""What rows have of their job's adapters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import ControlUse, ControlWork, LoraUse
from giornata.wire.jobs import RowState
from giornata_denoiser.attempts.inputs import adapters_of
from giornata_lab.bench.compute import tiny_flux
from giornata_lab.bench.compute.tiny_flux import Spec
from tests.contract.messages import JOB, REF
from tests.unit.denoiser.engine.test_masked import OF

USE = LoraUse(lora_id="lora_a", sha256="a" * 64, size_bytes=6, rank=4, modules=2)


@given(steps=st.integers(1, 200), data=st.data())
def test_a_row_begins_without_its_loras_for_as_long_as_all_of_them_allow(
    steps: int, data: st.DataObject
) -> None:
    bounds = data.draw(st.lists(st.integers(0, steps), min_size=1, max_size=4))
    uses = tuple(
        USE.model_copy(update={"sha256": str(index) * 64, "joins_within": bound / steps})
        for index, bound in enumerate(bounds)
    )
    job = JOB.model_copy(update={"loras": uses})
    assert adapters_of(job, steps).loras_from == min(bounds)
    resumed = RowState(step=1, latents=REF, loras_from=data.draw(st.integers(0, steps)))
    assert adapters_of(job, steps, resumed).loras_from == resumed.loras_from, "it keeps what it began with"


def test_a_row_computes_as_many_weights_as_its_loras_have() -> None:
    counted, uncounted = USE.model_copy(update={"weights": 96}), USE.model_copy(update={"size_bytes": 600})
    adapters = adapters_of(JOB.model_copy(update={"loras": (counted, uncounted)}), 8)
    assert adapters.low_rank(0) == 96 + 300, "files of which only the size is known hold 16 bits a weight"


def test_a_request_that_tells_the_step_has_its_loras_join_no_earlier() -> None:
    told = JOB.parameters.model_copy(update={"lora_join": 0.5})
    job = JOB.model_copy(update={"loras": (USE.model_copy(update={"joins_within": 0.5}),)})
    assert adapters_of(job, 8).joins_early
    forced = adapters_of(job.model_copy(update={"parameters": told}), 8)
    assert (forced.loras_from, forced.joins_early) == (4, False)


def test_a_lora_that_changes_nothing_bounds_nothing() -> None:
    bounded = USE.model_copy(update={"joins_within": 0.5})
    for nothing in ({"scale": 0.0}, {"modules": 0}):
        job = JOB.model_copy(update={"loras": (bounded, USE.model_copy(update=nothing))})
        adapters = adapters_of(job, 8)
        assert (len(adapters.loras), adapters.loras_from) == (1, 4)
    assert adapters_of(JOB, 8).loras_from == 0


@given(steps=st.integers(1, 60), start=st.floats(0, 1), end=st.floats(0, 1))
def test_a_controlnet_acts_in_the_steps_that_pipelines_of_diffusers_keep(
    steps: int, start: float, end: float
) -> None:
    use = ControlUse(model="edges", digest="e", start=start, end=end)
    (control,) = adapters_of(JOB.model_copy(update={"controls": (use,)}), steps).controls
    keeps = [1.0 - float(i / steps < start or (i + 1) / steps > end) for i in range(steps)]
    acts = [float(control.first_step <= step < control.end_step) for step in range(steps)]
    assert acts == keeps


@pytest.mark.parametrize("shared", [True, False])
def test_a_rows_sequences_count_what_its_controlnets_compute(shared: bool) -> None:
    """Once where they share it; nothing outside the steps of a ControlNet, or where another process computes it."""
    work = ControlWork(sequence=3, text=2, image=5, pair=1, text_pair=0.5, shared=shared)
    uses = [
        ControlUse(model=name, digest=name, scale=scale, start=0.25, end=0.75)
        for name, scale in (("here", 0.5), ("elsewhere", 1.0), ("idle", 0.0))
    ]
    job = JOB.model_copy(update={"controls": tuple(uses)})
    row = tiny_flux.row(OF, Spec(grid=(3, 4), true_cfg_scale=2.0, steps=4))
    row = replace(row, adapters=adapters_of(job, 4, nets={"here": work, "idle": work}))
    counted = [sum(shape.control for shape in replace(row, step=step).shapes) for step in range(4)]
    texts = [prompt.joint_tokens for prompt in row.inputs.prompts]
    each = [3 + 2 * text + 5 * 12 + 12**2 + 0.5 * ((text + 12) ** 2 - 12**2) for text in texts]
    assert len(each) == 2
    assert counted == pytest.approx([0, *[sum(each) / (2 if shared else 1)] * 2, 0])
