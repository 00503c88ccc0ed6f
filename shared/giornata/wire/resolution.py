"""The resolution of an application's parameters by a model: its defaults, its refusals, and its guidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, TypeVar

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import InvalidField, SizeMismatch
from giornata.wire.jobs import Job
from giornata.wire.models import SETTINGS, Guidance, ModelCard, Sampler, StepCache, Task, settings_of
from giornata.wire.requests import (
    EACH_PADDING,
    EACH_REGIONS,
    FIELDS,
    MAX_STEPS,
    REFERENCE,
    EditParameters,
    GenerationParameters,
    Quality,
    Reuse,
    SegmentationFields,
)

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


# Pictures from text alone: what is asked for, and the parameters with which it is carried out. Pure.
#
# A generation is a job without image. Its rows join the batches of edits, so its parameters are those of an
# edit that keeps nothing: full noise, no reuse.


def carried_out(generation: GenerationParameters) -> EditParameters:
    """The parameters with which a job without image is carried out."""
    fields = {name: getattr(generation, name) for name in GenerationParameters.model_fields}
    return EditParameters.model_construct(**fields, strength=1.0, reuse=Reuse.OFF)


def fitted(parameters: EditParameters, card: ModelCard) -> EditParameters:
    """A generation's `parameters` with the defaults that the model has for generations.

    SizeMismatch where a side is no multiple of the side of the model's tokens, InvalidField as :func:`check_taken`.
    """
    check_multiple(parameters, card)
    check_taken(vars(parameters), card, Task.GENERATE)
    return filled(parameters, card, Task.GENERATE)


def check_multiple(parameters: GenerationParameters, card: ModelCard) -> None:
    """Raise SizeMismatch where a side of the picture asked for is no multiple of the side of the model's tokens."""
    size, multiple = parameters.output_size, card.pixel_multiple
    if size is None or all(side % multiple == 0 for side in size):
        return
    width, height = (max(multiple, round(side / multiple) * multiple) for side in size)
    raise SizeMismatch(
        f"The model {card.name} ({card.family}) makes pictures whose sides are multiples of {multiple} pixels.",
        field="size",
        received=parameters.size,
        accepted=f"auto, or multiples of {multiple}, such as {width}x{height}",
    )


# Which field applies to which model: the one table that validation, the catalogue of models, and through it the
# studio and other clients, read. `FIELDS` of :mod:`giornata.wire.requests` tells which ones a task has at all.


class FieldRule(NamedTuple):
    """A field that not every model takes, or not with every value."""

    names: tuple[str, ...]
    """The field, and those that mean nothing without it."""
    takes: Callable[[ModelCard, Any], bool]
    """Whether a model takes a value of the field; of None, whether it takes any."""
    lacks: Callable[[ModelCard, Any], str]
    """Says of a model that it does not take a value."""
    accepted: Callable[[ModelCard], str]
    others: str = "models that take it"
    tasks: tuple[Task, ...] = tuple(Task)
    """The tasks whose requests are held to it."""


def _flag(field: str, takes: Callable[[ModelCard], bool], called: str) -> FieldRule:
    """The rule of a field that a model takes with every value, or not at all."""
    return FieldRule(
        (field,), lambda card, _: takes(card), lambda *_: f"takes no {called}", lambda _: f"leave {field} out"
    )


RULES: Final = (
    _flag("guidance_scale", attrgetter("takes_guidance"), "guidance_scale"),
    _flag("negative_prompt", attrgetter("takes_negative_prompt"), "negative prompt"),
    _flag("true_cfg_scale", attrgetter("takes_true_cfg"), "true classifier-free guidance"),
    FieldRule(
        ("sampler",),
        lambda card, sampler: sampler in {None, *card.samplers},
        lambda _, sampler: f"does not take the sampler {sampler}",
        lambda card: ", ".join(card.samplers),
    ),
    FieldRule(
        ("step_cache", *SETTINGS),
        lambda card, cache: cache is StepCache.OFF or (cache or StepCache.TAYLORSEER) in card.step_caches,
        lambda _, cache: f"has no step cache {cache} where it is served",
        lambda card: ", ".join((StepCache.OFF, *card.step_caches)),
    ),
    FieldRule(
        (REFERENCE,),
        lambda card, count: (1 if count is None else count) <= card.max_references,
        lambda card, _: f"takes {'fewer' if card.max_references else 'no'} references",
        lambda card: f"at most {card.max_references}" if card.max_references else f"leave {REFERENCE} out",
        "models that take so many",
    ),
    FieldRule(
        ("background",),
        lambda _, background: background != "transparent",
        lambda *_: "makes opaque pictures from text; none that is served makes others",
        lambda _: "auto or opaque; an edit keeps the transparency of its image",
        tasks=(Task.GENERATE,),
    ),
)
"""Rules by a model's card. What a request names beside the model, as ControlNets and LoRAs, is looked up, and refused
where it is not found; so are masks from words."""


def check_taken(
    given: Mapping[str, Any], card: ModelCard, task: Task = Task.EDIT, served: Iterable[ModelCard] = ()
) -> None:
    """Raise InvalidField where a model does not take a value of the fields `given`; it names `served` ones that do.

    The value of :data:`REFERENCE` is how many there are. Fields without a rule, and values of None, are let through.
    """
    for rule in RULES:
        field, value = rule.names[0], given.get(rule.names[0])
        if task not in rule.tasks or value is None or rule.takes(card, value):
            continue
        able = ", ".join(sorted(each.name for each in served if rule.takes(each, value)))
        received = {"negative_prompt": "a text", REFERENCE: f"{value} picture{'s' if value != 1 else ''}"}
        raise InvalidField(
            f"The model {card.name} ({card.family}) {rule.lacks(card, value)}.",
            field=field,
            received=received.get(field, value),
            accepted=rule.accepted(card) + (f"; {rule.others}: {able}" if able else ""),
        )


def fields_of(card: ModelCard, *, controlled: bool, masked: bool) -> Mapping[Task, list[str]]:
    """The fields that requests for each task of a model may name; the others are refused.

    Some ControlNet is served with the model where it is `controlled`, and masks from words are where it is `masked`.
    """
    refused = {name for rule in RULES if not rule.takes(card, None) for name in rule.names}
    refused |= set() if masked else set(SegmentationFields.model_fields)
    refused |= set() if controlled else {"controlnets", *CONTROL_IMAGES}
    return {task: [name for name in FIELDS[task] if name not in refused] for task in card.tasks}


def resolve(
    parameters: EditParameters, card: ModelCard, seed: int, served: Iterable[ModelCard] = ()
) -> EditParameters:
    """`parameters` with every default of the model filled in, so that a record says exactly what was done.

    `seed` is used where the application named none; `served` are the models that an error may name. InvalidField if a
    field does not apply to this model, or has no effect with the others.
    """
    check_taken(vars(parameters), card, served=served)
    if parameters.step_cache is not StepCache.OFF and parameters.controlnets:
        raise InvalidField(
            "What ControlNets add belongs to one step; steps that are skipped have no place for it.",
            field="step_cache",
            received=f"{parameters.step_cache} with controlnets",
            accepted=f"{StepCache.OFF}, or no controlnets",
        )
    named: dict[str, object] = {
        "model": card.name,  # not an alias
        "seed": seed if parameters.seed is None else parameters.seed,
    }
    if parameters.auto_edit:
        padding, most = parameters.padding_mask_crop, parameters.max_regions
        named |= {
            "reuse": Reuse.OFF,  # what is recorded of a picture knows nothing of a crop
            "padding_mask_crop": EACH_PADDING if padding is None else padding,
            "max_regions": most or EACH_REGIONS,
        }
    resolved = filled(parameters, card, Task.EDIT)
    settings = settings_of(resolved.step_cache, resolved.num_inference_steps or card.default_steps)
    named |= {field: value for field, value in settings.items() if getattr(resolved, field) is None}
    resolved = resolved.model_copy(update=named)
    if resolved.negative_prompt is not None and cfg_scale(resolved, card) is None:
        field = "true_cfg_scale" if card.takes_true_cfg else "guidance_scale"
        least = 1 if card.takes_true_cfg else card.guided_above
        raise InvalidField(
            f"The model {card.name} ({card.family}) reads a negative prompt with {field} above {least:g}.",
            field="negative_prompt",
            received=f"{field} {getattr(resolved, field):g}",
            accepted=f"{field} above {least:g}, or no negative prompt",
        )
    return resolved


def cfg_scale(parameters: EditParameters, card: ModelCard) -> float | None:
    """The scale of classifier-free guidance of resolved `parameters`; None where no unguided half is computed.

    It is computed exactly where the family's pipeline in diffusers does.
    """
    if card.guidance is Guidance.CLASSIFIER_FREE:
        scale, least = parameters.guidance_scale, card.guided_above or 0.0
    else:
        scale, least = parameters.true_cfg_scale, 1.0
        if parameters.negative_prompt is None:
            return None
    return scale if scale is not None and scale > least else None


def guided_by(job: Job) -> float | None:
    """The scale of a job's classifier-free guidance; None where no unguided half is computed.

    An older gateway records no `cfg_scale`: its models have `true_cfg_scale` alone, and a negative prompt with it.
    """
    older = job.parameters.true_cfg_scale or 0.0
    return older if job.cfg_scale is None and older > 1 else job.cfg_scale
