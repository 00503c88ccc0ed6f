"""What a request means by the fields that it leaves out, by model, task and pipeline; and what generations are."""

from __future__ import annotations

import inspect
import math
from typing import Any

import diffusers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from giornata.families import KINDS, CheckpointKind
from giornata.wire import codec
from giornata.wire.errors import InvalidField, ModelNotFound, SizeMismatch, TaskNotSupported
from giornata.wire.jobs import Job
from giornata.wire.models import Guidance, ModelCard, Task
from giornata.wire.requests import (
    EDIT_FIELDS,
    MAX_STEPS,
    EditParameters,
    GenerationParameters,
    Reuse,
    asked,
    evaluations_of,
)
from giornata.wire.resolution import carried_out, check_multiple, defaults_of, fields_of, fitted, resolve
from giornata_gateway.fleet import choose_card
from giornata_gateway.rules.forms import EditForm, read_form
from giornata_gateway.views.catalog import model_list
from tests.contract.messages import JOB
from tests.fakes.fleet import CARD

PAINTER = CARD.model_copy(
    update={"tasks": (Task.EDIT, Task.GENERATE), "generation_guidance_scale": 3.5, "generation_steps": 9}
)
TRUE_CFG = PAINTER.model_copy(
    update={"takes_guidance": False, "takes_true_cfg": True, "default_true_cfg_scale": 4.0, "reuses": False}
)
STATED: dict[str, dict[str, float]] = {"QwenImageEditPipeline": {"strength": 1.0}}
"""Where another default than the inpainting pipeline's is meant: an instruction begins from noise."""


def carried(card: ModelCard, task: Task, **asked: Any) -> EditParameters:
    """The parameters of a job for the task."""
    if task is Task.EDIT:
        return resolve(EditParameters(prompt="x", **asked), card, 1)
    return resolve(fitted(carried_out(GenerationParameters(prompt="x", **asked)), card), card, 1)


@pytest.mark.parametrize("task", Task)
@pytest.mark.parametrize("card", [PAINTER, TRUE_CFG])
def test_what_a_model_tells_is_what_its_jobs_have(card: ModelCard, task: Task) -> None:
    (told,) = model_list({"m": card}, {}).model_dump(mode="json")["data"]
    defaults = told["defaults"][task]
    assert defaults == defaults_of(card, task)
    assert defaults.keys() <= set(fields_of(card, controlled=False, masked=False)[task])
    named = {"negative_prompt": "snow"} if card.takes_true_cfg else {}
    job = carried(card, task, **named)
    assert {name: getattr(job, name) for name in defaults} == defaults
    assert carried(card, task, **named | {name: defaults[name] for name in defaults}) == job


@pytest.mark.parametrize(
    ("quality", "steps", "reuse"),
    [
        *((name, 10, "auto") for name in ("auto", "standard", "medium")),
        ("low", 5, "auto"),
        *((name, 15, "off") for name in ("high", "hd")),
        *((name, 20, "off") for name in ("xhigh", "max")),
    ],
)
def test_a_quality_stands_for_steps_and_reuse(quality: str, steps: int, reuse: str) -> None:
    card = PAINTER.model_copy(update={"default_steps": 10})
    told = carried(card, Task.EDIT, quality=quality)
    assert (told.num_inference_steps, told.reuse) == (steps, reuse)
    generated = carried(card, Task.GENERATE, quality=quality).num_inference_steps
    assert generated == math.ceil(9 * steps / 10)
    named = carried(card, Task.EDIT, quality=quality, num_inference_steps=3, reuse="strict")
    assert (named.num_inference_steps, named.reuse) == (3, "strict")
    assert carried(card, Task.EDIT, quality=quality, reuse="auto").reuse == "auto", "named, it goes first"
    fields = [("prompt", "x"), ("quality", quality), ("reuse", "auto")]
    for form, expected in ((fields, "auto"), (fields[:2], reuse)):
        assert resolve(read_form(EditForm, form).parameters(), card, 1).reuse == expected
    assert carried(card, Task.GENERATE, quality=quality).reuse == "off"
    many = card.model_copy(update={"default_steps": 150})
    assert (carried(many, Task.EDIT, quality=quality).num_inference_steps or 0) <= MAX_STEPS


def test_each_task_has_defaults_of_its_own_and_older_cards_those_of_edits() -> None:
    steps = {task: defaults_of(PAINTER, task)["num_inference_steps"] for task in Task}
    assert steps == {Task.EDIT: CARD.default_steps, Task.GENERATE: 9}
    assert "strength" not in defaults_of(PAINTER, Task.GENERATE)
    older = ModelCard.model_validate(PAINTER.model_dump(exclude={"generation_steps"}))
    assert defaults_of(older, Task.GENERATE)["num_inference_steps"] == CARD.default_steps
    assert carried(TRUE_CFG, Task.GENERATE).true_cfg_scale is None, "it weighs a negative prompt"
    assert TRUE_CFG.guidance is Guidance.NONE


@pytest.mark.parametrize(
    "name", [name for name in KINDS if hasattr(diffusers, name.replace("Pipeline", "InpaintPipeline"))]
)
def test_a_kinds_defaults_are_those_of_diffusers_pipelines(name: str) -> None:
    kind = KINDS[name]
    made = _signature(name)
    assert (kind.generation_steps or kind.steps, *_scales(kind, kind.generation_guidance_scale)) == (
        made["num_inference_steps"].default,
        *_scales(kind, made["guidance_scale"].default),
    )
    edited = _signature(name.replace("Pipeline", "InpaintPipeline"))
    found = {field: edited[field].default for field in ("num_inference_steps", "strength")} | STATED.get(
        name, {}
    )
    assert found == {"num_inference_steps": kind.steps, "strength": kind.strength}
    assert _scales(kind, kind.guidance_scale) == _scales(kind, edited["guidance_scale"].default)
    if kind.takes_true_cfg:
        assert made["true_cfg_scale"].default == edited["true_cfg_scale"].default == kind.true_cfg_scale


def _signature(name: str) -> Any:
    return inspect.signature(getattr(diffusers, name).__call__).parameters


def _scales(kind: CheckpointKind, scale: float | None) -> tuple[float | None, ...]:
    """No scale for Qwen-Image: its networks embed no guidance, and only `true_cfg_scale` has a default."""
    return () if kind.family.startswith("qwen-image") else (scale,)


# Parameters of generations: what is refused, what is filled in, which sizes a model makes.


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
