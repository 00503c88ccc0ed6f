"""The resolution of an application's parameters by a model: its defaults, its refusals, and its guidance."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Final, Literal, TypeVar

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.errors import InvalidField, SizeMismatch
from giornata.wire.jobs import Job
from giornata.wire.models import SETTINGS, Guidance, ModelCard, Sampler, StepCache, Task, settings_of
from giornata.wire.requests import (
    EACH_PADDING,
    EACH_REGIONS,
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


FIELDS: Final[Mapping[Task, tuple[str, ...]]] = {
    Task.EDIT: ("image", "mask", REFERENCE, *CONTROL_IMAGES, "template_id", *EditParameters.model_fields),
    Task.GENERATE: (REFERENCE, *CONTROL_IMAGES, *GenerationParameters.model_fields),
}
"""Fields of each task, the same at every door; a model may take fewer of them."""
EDIT_FIELDS: Final = frozenset(FIELDS[Task.EDIT]).difference(FIELDS[Task.GENERATE])
"""Fields that only edits have."""


def check_fields(given: Iterable[str]) -> None:
    """Raise InvalidField where a generation names fields that only edits have."""
    of_edits = sorted(EDIT_FIELDS.intersection(given))
    if of_edits:
        raise InvalidField(
            f"A generation begins without a picture: {', '.join(of_edits)} belong to edits.",
            field=of_edits[0],
            received=", ".join(of_edits),
            accepted=f"leave {' and '.join(of_edits)} out, or ask for an edit",
        )


def carried_out(generation: GenerationParameters) -> EditParameters:
    """The parameters with which a job without image is carried out."""
    fields = {name: getattr(generation, name) for name in GenerationParameters.model_fields}
    return EditParameters.model_construct(**fields, strength=1.0, reuse=Reuse.OFF)


def fitted(parameters: EditParameters, card: ModelCard) -> EditParameters:
    """A generation's `parameters` with the defaults that the model has for generations.

    SizeMismatch where a side is no multiple of the side of the model's tokens, InvalidField where the background is to
    be transparent.
    """
    check_multiple(parameters, card)
    if parameters.background == "transparent":
        raise InvalidField(
            f"The model {card.name} ({card.family}) makes opaque pictures from text; none that is served makes others.",
            field="background",
            received=parameters.background,
            accepted="auto or opaque; an edit keeps the transparency of its image",
        )
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


_BY_CARD: Final[tuple[tuple[str, Callable[[ModelCard], bool], str], ...]] = (
    ("guidance_scale", attrgetter("takes_guidance"), "guidance_scale"),
    ("negative_prompt", attrgetter("takes_negative_prompt"), "negative prompt"),
    ("true_cfg_scale", attrgetter("takes_true_cfg"), "true classifier-free guidance"),
)
"""Fields that a model may not take, whether it does, and what they are called."""


def fields_of(card: ModelCard, *, controlled: bool, masked: bool) -> Mapping[Task, list[str]]:
    """The fields that requests for each task of a model may name; the others are refused.

    Some ControlNet is served with the model where it is `controlled`, and masks from words are where it is `masked`.
    """
    refused = {field for field, takes, _ in _BY_CARD if not takes(card)}
    refused |= set() if card.max_references else {REFERENCE}
    refused |= set() if masked else set(SegmentationFields.model_fields)
    refused |= set() if StepCache.TAYLORSEER in card.step_caches else {"step_cache", *SETTINGS}
    refused |= set() if controlled else {"controlnets", *CONTROL_IMAGES}
    return {task: [name for name in FIELDS[task] if name not in refused] for task in card.tasks}


def resolve(
    parameters: EditParameters, card: ModelCard, seed: int, served: Iterable[ModelCard] = ()
) -> EditParameters:
    """`parameters` with every default of the model filled in, so that a record says exactly what was done.

    `seed` is used where the application named none; `served` are the models that an error may name. InvalidField if a
    field does not apply to this model, or has no effect with the others.
    """
    _check_taken(parameters, card, served)
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


def _check_taken(parameters: EditParameters, card: ModelCard, served: Iterable[ModelCard]) -> None:
    """InvalidField if a field does not apply to the model; names the models of `served` that take it."""

    def refused(field: str, why: str, accepted: str, takes: Callable[[ModelCard], bool]) -> InvalidField:
        received = getattr(parameters, field)
        able = ", ".join(sorted(each.name for each in served if takes(each)))
        return InvalidField(
            f"The model {card.name} ({card.family}) {why}.",
            field=field,
            received="a text" if field == "negative_prompt" else received,
            accepted=accepted + (f"; models that take it: {able}" if able else ""),
        )

    for field, takes, what in _BY_CARD:
        if getattr(parameters, field) is not None and not takes(card):
            raise refused(field, f"takes no {what}", f"leave {field} out", takes)
    sampler, cache = parameters.sampler, parameters.step_cache
    if sampler is not None and sampler not in card.samplers:
        why, accepted = f"does not take the sampler {sampler}", ", ".join(card.samplers)
        raise refused("sampler", why, accepted, lambda each: sampler in each.samplers)
    if cache is StepCache.OFF:
        return
    if cache not in card.step_caches:
        why = f"has no step cache {cache} where it is served"
        accepted = ", ".join((StepCache.OFF, *card.step_caches))
        raise refused("step_cache", why, accepted, lambda each: cache in each.step_caches)
    if parameters.controlnets:
        raise InvalidField(
            "What ControlNets add belongs to one step; steps that are skipped have no place for it.",
            field="step_cache",
            received=f"{cache} with controlnets",
            accepted=f"{StepCache.OFF}, or no controlnets",
        )
