"""What a request means by the fields that it leaves out, by model and task. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, Literal, TypeVar

from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import MAX_STEPS, GenerationParameters, Quality, Reuse
from giornata.wire.samplers import Sampler

P = TypeVar("P", bound=GenerationParameters)
Default = float | int | str
ToldQuality = Literal["low", "medium", "high", "xhigh", "max"]
QUALITIES: Final[Mapping[Quality, tuple[ToldQuality, float]]] = {
    "auto": ("medium", 1.0), "standard": ("medium", 1.0), "low": ("low", 0.5), "medium": ("medium", 1.0),
    "high": ("high", 1.5), "hd": ("high", 1.5), "xhigh": ("xhigh", 2.0), "max": ("max", 2.0),
}  # fmt: skip
"""What OpenAI's answers call each quality, and its steps as a share of the model's; more than 1 turns reuse off."""


def defaults_of(card: ModelCard, task: Task) -> Mapping[str, Default]:
    """The defaults that differ by model, by the field's name; fields that the model refuses have none.

    That of `true_cfg_scale` holds where there is a negative prompt. `reuse` is what `auto` stands for.
    """
    steps, guidance_scale = card.default_steps, card.default_guidance_scale
    if task is Task.GENERATE:
        steps = card.generation_steps or steps
        guidance_scale = (
            guidance_scale if card.generation_guidance_scale is None else card.generation_guidance_scale
        )
    defaults: dict[str, Default] = {"num_inference_steps": steps, "sampler": Sampler(card.default_sampler)}
    if card.takes_guidance:
        defaults["guidance_scale"] = guidance_scale
    if card.takes_true_cfg:
        defaults["true_cfg_scale"] = card.default_true_cfg_scale
    if task is Task.EDIT:
        defaults |= {
            "strength": card.default_strength,
            "reuse": Reuse.AUTO if card.reuses else Reuse.OFF,
        }
    return defaults


def steps_of(quality: Quality, card: ModelCard, task: Task) -> int:
    """Steps that a quality stands for."""
    steps = int(defaults_of(card, task)["num_inference_steps"]) * QUALITIES[quality][1]
    return min(MAX_STEPS, math.ceil(steps))


def filled(parameters: P, card: ModelCard, task: Task) -> P:
    """`parameters` with the model's defaults where they name nothing, as `quality` changes them."""
    defaults = dict(defaults_of(card, task))
    defaults["num_inference_steps"] = steps_of(parameters.quality, card, task)
    named = "reuse" in parameters.model_fields_set
    if QUALITIES[parameters.quality][1] > 1 and "reuse" in defaults and not named:
        defaults["reuse"] = Reuse.OFF
    if parameters.negative_prompt is None:
        defaults.pop("true_cfg_scale", None)
    missing = {
        name: value for name, value in defaults.items() if getattr(parameters, name) in {None, Reuse.AUTO}
    }
    return parameters.model_copy(update=missing)
