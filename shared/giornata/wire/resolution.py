"""What a model makes of an application's parameters: its defaults, its refusals, and its guidance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import Final

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.defaults import filled
from giornata.wire.errors import InvalidField
from giornata.wire.generations import FIELDS
from giornata.wire.jobs import Job
from giornata.wire.mask_words import EACH_PADDING, EACH_REGIONS, SegmentationFields
from giornata.wire.models import Guidance, ModelCard, Task
from giornata.wire.references import REFERENCE
from giornata.wire.requests import EditParameters, Reuse
from giornata.wire.samplers import Sampler
from giornata.wire.step_caches import SETTINGS, StepCache, settings_of

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
    for field, takes, what in _BY_CARD:
        received = getattr(parameters, field)
        if received is not None and not takes(card):
            able = sorted(each.name for each in served if takes(each))
            raise InvalidField(
                f"The model {card.name} ({card.family}) takes no {what}.",
                field=field,
                received="a text" if isinstance(received, str) else received,
                accepted=f"leave {field} out" + (f"; models that take it: {', '.join(able)}" if able else ""),
            )
    if parameters.sampler is not None and parameters.sampler not in card.samplers:
        raise _sampler_refused(parameters.sampler, card, served)
    _check_step_cache(parameters, card, served)
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


def _check_step_cache(parameters: EditParameters, card: ModelCard, served: Iterable[ModelCard]) -> None:
    """InvalidField if the model has no such step cache, or the request's other fields leave it no meaning."""
    asked = parameters.step_cache
    if asked is StepCache.OFF:
        return
    if asked not in card.step_caches:
        able = sorted(each.name for each in served if asked in each.step_caches)
        raise InvalidField(
            f"The model {card.name} ({card.family}) has no step cache {asked} where it is served.",
            field="step_cache",
            received=asked,
            accepted=", ".join((StepCache.OFF, *card.step_caches))
            + (f"; models that take it: {', '.join(able)}" if able else ""),
        )
    if parameters.controlnets:
        raise InvalidField(
            "What ControlNets add belongs to one step; steps that are skipped have no place for it.",
            field="step_cache",
            received=f"{asked} with controlnets",
            accepted=f"{StepCache.OFF}, or no controlnets",
        )


def _sampler_refused(sampler: Sampler, card: ModelCard, served: Iterable[ModelCard]) -> InvalidField:
    takers = sorted(other.name for other in served if sampler in other.samplers)
    return InvalidField(
        f"The model {card.name} ({card.family}) does not take the sampler {sampler}.",
        field="sampler",
        received=sampler,
        accepted=", ".join(card.samplers) + (f"; models that take it: {', '.join(takers)}" if takers else ""),
    )
