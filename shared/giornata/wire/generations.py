"""Pictures from text alone: what is asked for, and the parameters with which it is carried out. Pure.

A generation is a job without image. Its rows join the batches of edits, so its parameters are those of an edit that
keeps nothing: full noise, no reuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from giornata.wire.adapters import CONTROL_IMAGES
from giornata.wire.defaults import filled
from giornata.wire.errors import InvalidField, SizeMismatch
from giornata.wire.models import ModelCard, Task
from giornata.wire.references import REFERENCE
from giornata.wire.requests import EditParameters, GenerationParameters, Reuse

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
