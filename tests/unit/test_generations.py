"""Parameters of generations: what is refused, what is filled in, which sizes a model makes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.wire import codec
from giornata.wire.errors import InvalidField, ModelNotFound, SizeMismatch, TaskNotSupported
from giornata.wire.jobs import Job
from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import (
    EDIT_FIELDS,
    EditParameters,
    GenerationParameters,
    Reuse,
    asked,
    evaluations_of,
)
from giornata.wire.resolution import carried_out, check_multiple, fitted, resolve
from giornata_gateway.views.catalog import choose_card
from tests.contract.messages import JOB
from tests.fakes.fleet import CARD

FLUX = CARD.model_copy(
    update={
        "name": "flux",
        "default_strength": 0.6,
        "tasks": (Task.EDIT, Task.GENERATE),
        "generation_guidance_scale": 3.5,
    }
)


def resolved(card: ModelCard = FLUX, **fields: object) -> EditParameters:
    generation = asked(GenerationParameters, {"prompt": "x", **fields})
    return resolve(fitted(carried_out(generation), card), card, seed=3)


def test_a_generation_keeps_nothing_of_any_picture_and_has_defaults_of_its_own() -> None:
    made = resolved()
    assert (made.strength, made.reuse, evaluations_of(made)) == (1.0, Reuse.OFF, FLUX.default_steps)
    assert (made.guidance_scale, made.seed, made.model) == (3.5, 3, "flux")
    assert resolved(guidance_scale=2.0).guidance_scale == 2.0
    assert resolved(FLUX.model_copy(update={"takes_guidance": False})).guidance_scale is None
    assert EditParameters.model_validate(made.model_dump()) == made


@pytest.mark.parametrize("field", sorted(EDIT_FIELDS))
def test_fields_of_edits_are_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidField, match=field) as refused:
        asked(GenerationParameters, {"prompt": "x", field: "y"})
    assert refused.value.field == field


@given(st.integers(10, 4096), st.integers(10, 4096))
def test_the_size_that_a_refusal_names_is_accepted(width: int, height: int) -> None:
    wanted = GenerationParameters(prompt="x", size=f"{width}x{height}")
    multiple = FLUX.pixel_multiple
    if width % multiple == height % multiple == 0:
        check_multiple(wanted, FLUX)
        return
    with pytest.raises(SizeMismatch) as refused:
        check_multiple(wanted, FLUX)
    named = (refused.value.accepted or "").rsplit(" ", 1)[1]
    near = GenerationParameters(prompt="x", size=named)
    check_multiple(near, FLUX)
    assert near.output_size is not None
    assert all(
        abs(one - side) < multiple for one, side in zip(near.output_size, (width, height), strict=True)
    )


def test_a_model_is_chosen_among_those_that_do_the_task() -> None:
    cards = {"tiny": CARD, "flux": FLUX}
    assert choose_card(cards, None, [], Task.GENERATE) is FLUX
    assert choose_card(cards, "tiny", [], Task.EDIT) is CARD
    with pytest.raises(TaskNotSupported, match="Accepted: flux"):
        choose_card(cards, "tiny", [], Task.GENERATE)
    with pytest.raises(
        TaskNotSupported, match=r"tiny \(flux-fill\) cannot generate.*no served model can generate"
    ):
        choose_card({"tiny": CARD}, None, [], Task.GENERATE)
    with pytest.raises(ModelNotFound, match="Accepted: flux"):
        choose_card(cards, "other", [], Task.GENERATE)
    with pytest.raises(InvalidField, match="flux, fluxer"):
        choose_card({**cards, "fluxer": FLUX}, None, [], Task.GENERATE)


def test_a_job_without_image_stays_one_on_its_way() -> None:
    job = JOB.model_copy(update={"image": None, "template_id": None})
    assert (JOB.task, job.task) == (Task.EDIT, Task.GENERATE)
    assert codec.decode(Job, codec.encode(job)) == job
