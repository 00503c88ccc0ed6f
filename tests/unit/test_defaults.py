"""What a request means by the fields that it leaves out: by model, by task, and as diffusers' pipelines have it."""

from __future__ import annotations

import inspect
import math
from typing import Any

import diffusers
import pytest

from giornata.families import KINDS, CheckpointKind
from giornata.wire.models import Guidance, ModelCard, Task
from giornata.wire.requests import MAX_STEPS, EditParameters, GenerationParameters
from giornata.wire.resolution import carried_out, defaults_of, fields_of, fitted, resolve
from giornata_gateway.rules.forms import EditForm, read_form
from giornata_gateway.views.catalog import model_list
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
    for given, expected in ((fields, "auto"), (fields[:2], reuse)):
        assert resolve(read_form(EditForm, given).parameters(), card, 1).reuse == expected
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
