"""What a request means by the fields that it leaves out, by model and task. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, TypeVar

from giornata.wire.models import ModelCard, Task
from giornata.wire.requests import MAX_STEPS, GenerationParameters, Reuse
from giornata.wire.samplers import Sampler

P = TypeVar("P", bound=GenerationParameters)
Default = float | int | str
STEP_SHARES: Final[Mapping[str, float]] = {"low": 0.5, "high": 1.5, "hd": 1.5, "xhigh": 2.0, "max": 2.0}
"""Steps of a quality as a share of the model's; any other has its own. More than 1 also turns reuse off."""


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


def filled(parameters: P, card: ModelCard, task: Task) -> P:
    """`parameters` with the model's defaults where they name nothing, as `quality` changes them."""
    defaults = dict(defaults_of(card, task))
    share = STEP_SHARES.get(parameters.quality, 1.0)
    defaults["num_inference_steps"] = min(MAX_STEPS, math.ceil(int(defaults["num_inference_steps"]) * share))
    if share > 1 and "reuse" in defaults:
        defaults["reuse"] = Reuse.OFF
    if parameters.negative_prompt is None:
        defaults.pop("true_cfg_scale", None)
    missing = {
        name: value for name, value in defaults.items() if getattr(parameters, name) in {None, Reuse.AUTO}
    }
    return parameters.model_copy(update=missing)
