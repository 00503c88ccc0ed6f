"""Step caches at the door, in model cards and in what routers expect of rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from giornata.fleet import served_models
from giornata.scheduling.demand import RowShape, StepTimeModel, shape_of
from giornata.wire.adapters import AskedControl
from giornata.wire.errors import InvalidField
from giornata.wire.models import SETTINGS, ModelCard, StepCache, Task, TaylorSeerSchedule
from giornata.wire.requests import EditParameters, extrapolated_steps
from giornata.wire.resolution import fields_of, resolve
from giornata.wire.workers import RowProgress, ServiceName, ServiceState
from tests.fakes.fleet import CARD
from tests.unit.test_requests import refusal

CACHED = CARD.model_copy(update={"step_caches": tuple(StepCache)[1:], "name": "cached"})


@pytest.mark.parametrize(
    ("given", "field", "told"),
    [
        ({"step_cache": "teacache"}, "step_cache", "'off' or 'taylorseer'"),
        (
            {"step_cache": "first-block"},
            "step_cache",
            "Received: first-block. Accepted: Input should be 'off' or",
        ),
        ({"step_cache_interval": 3}, "step_cache_interval", "needs step_cache taylorseer"),
        ({"step_cache": "off", "step_cache_order": 0}, "step_cache_order", "needs step_cache taylorseer"),
        ({"step_cache": "taylorseer", "step_cache_interval": 1}, "step_cache_interval", "equal to 2"),
        ({"step_cache": "taylorseer", "step_cache_order": 4}, "step_cache_order", "equal to 3"),
        ({"step_cache": "taylorseer", "step_cache_warmup": 0}, "step_cache_warmup", "equal to 1"),
    ],
)
def test_a_step_cache_that_means_nothing_is_refused(given: dict[str, object], field: str, told: str) -> None:
    error = refusal(**given)
    assert isinstance(error, InvalidField)
    assert error.field == field
    assert told in str(error)


def test_a_model_without_a_step_cache_refuses_it_and_names_those_that_have_it() -> None:
    asked = EditParameters(prompt="x", step_cache=StepCache.TAYLORSEER)
    with pytest.raises(
        InvalidField, match=r"Received: taylorseer. Accepted: off; models that take it: cached"
    ):
        resolve(asked, CARD, 1, [CARD, CACHED])
    assert {"step_cache", *SETTINGS} < set(fields_of(CACHED, controlled=False, masked=False)[Task.EDIT])
    assert not any(
        name.startswith("step_cache") for name in fields_of(CARD, controlled=True, masked=False)[Task.EDIT]
    )


def test_a_step_cache_is_refused_with_controlnets() -> None:
    asked = EditParameters(
        prompt="x", step_cache=StepCache.TAYLORSEER, controlnets=(AskedControl(model="canny", image=0),)
    )
    with pytest.raises(InvalidField, match="taylorseer with controlnets"):
        resolve(asked, CACHED, 1)


def test_a_step_cache_has_the_defaults_of_its_kind_and_of_the_number_of_steps() -> None:
    def settings(**given: object) -> list[object]:
        found = resolve(EditParameters.model_validate({"prompt": "x", **given}), CACHED, 1)
        return [getattr(found, field) for field in SETTINGS]

    assert settings() == [None] * 3
    for steps, interval in ((4, 2), (10, 3), (39, 3), (40, 5)):
        assert settings(step_cache="taylorseer", num_inference_steps=steps) == [interval, 1, 3]
    assert settings(step_cache="taylorseer", step_cache_interval=7, step_cache_order=0) == [7, 0, 3]


def test_a_model_tells_the_least_of_what_its_workers_have() -> None:
    one = CACHED.model_copy(update={"name": "m"})
    few = one.model_copy(update={"step_caches": ()})

    def told(*of: ModelCard) -> tuple[str, ...]:
        states = [
            ServiceState(service=service, instance=f"i{n}", host="h", version="1", ready=True, models=(card,))
            for n, (service, card) in enumerate(
                [(ServiceName.PREPOST, one), *((ServiceName.DENOISER, card) for card in of)]
            )
        ]
        return served_models(states)["m"].step_caches

    assert told(one) == one.step_caches
    assert told(one, few) == told(few, one) == few.step_caches


def test_extrapolated_steps_cost_nothing_and_the_first_one_in_full_is_not_among_them() -> None:
    asked = EditParameters(prompt="x", step_cache=StepCache.TAYLORSEER, num_inference_steps=20)
    resolved = resolve(asked, CACHED, 1)
    skipped = extrapolated_steps(resolved, 20)
    assert skipped == 20 - len([0, 1, 2, 4, 7, 10, 13, 16, 19])
    assert extrapolated_steps(EditParameters(prompt="x"), 20) == 0
    shape = RowShape(text=10, image=100, computed=30, steps=20)
    for reuses in (False, True):
        plain, cached = (
            each.load(StepTimeModel(), reuses=reuses) for each in (shape, replace(shape, skipped=skipped))
        )
        assert cached.steps * cached.step_ms == pytest.approx(plain.step_ms * (20 - skipped))
        assert (cached.first_ms, cached.tokens) == (plain.first_ms, plain.tokens)


def test_a_row_that_runs_is_as_cheap_as_its_steps_to_come() -> None:
    row = RowProgress(job_id="j", attempt=1, index=0, step=4, steps=20, tokens=100, skipped_steps=12)
    assert shape_of(row).skipped == 12
    assert shape_of(row.model_copy(update={"step": 19})).skipped == 0, "its last step may be the one computed"


def test_which_steps_are_extrapolated() -> None:
    computed = [step for step in range(12) if TaylorSeerSchedule(4, 2).computes(step)]
    assert computed == [0, 1, 3, 7, 11]
    assert TaylorSeerSchedule(4, 2).skipped(12) == 7
