"""Pictures that a model looks at beside the one that it edits: how many a request may bring, and their names. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeVar

from giornata.wire.errors import InvalidField
from giornata.wire.models import ModelCard

T = TypeVar("T")

REFERENCE: Final = "reference"
"""Name of the field."""
MAX_REFERENCES: Final = 15
"""Most that a request may bring beside its image, whatever its model; a model's card tells how many it takes."""


def reference_name(index: int) -> str:
    """The name of a reference's tensor where references travel together."""
    return f"{REFERENCE}_{index}"


def named_references(references: Sequence[T]) -> dict[str, T]:
    """References by name, in their order."""
    return {reference_name(index): reference for index, reference in enumerate(references)}


def check_count(count: int) -> None:
    """Raise InvalidField where a request brings more references than any model takes."""
    if count > MAX_REFERENCES:
        raise InvalidField(
            "The request brings too many references.",
            field=REFERENCE,
            received=f"{count} pictures",
            accepted=f"at most {MAX_REFERENCES}",
        )


def check_taken(count: int, card: ModelCard, served: Iterable[ModelCard] = ()) -> None:
    """Raise InvalidField where a model takes fewer references than a request brings.

    `served` are the models that the error may name.
    """
    if count <= card.max_references:
        return
    able = ", ".join(sorted(each.name for each in served if each.max_references >= count))
    own = f"at most {card.max_references}" if card.max_references else f"leave {REFERENCE} out"
    raise InvalidField(
        f"The model {card.name} ({card.family}) takes "
        + ("fewer references." if card.max_references else "no references."),
        field=REFERENCE,
        received=f"{count} picture{'s' if count > 1 else ''}",
        accepted=own + (f"; models that take so many: {able}" if able else ""),
    )
