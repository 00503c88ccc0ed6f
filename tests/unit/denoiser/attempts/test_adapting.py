"""What rows have of their job's adapters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from giornata.wire.adapters import LoraUse
from giornata.wire.progress import RowState
from giornata_denoiser.attempts.adapting import adapters_of
from tests.contract.messages import JOB, REF

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
