"""What ControlNets compute in a step, as multiplications. Pure."""

from __future__ import annotations

from giornata.planning.operations import VALUE_BYTES
from giornata.wire.adapters import ControlCard, ControlKind, ControlWork


def control_work(work: ControlWork, *, text: int, image: int, sequences: int) -> float:
    """Multiplications of a ControlNet for one of a row's `sequences` in one step.

    The sequence has so many `text` tokens, padding among them, and the picture so many `image` tokens. Of what
    sequences share, each has its part.
    """
    pairs = image**2
    total = (
        work.sequence
        + work.text * text
        + work.image * image
        + work.pair * pairs
        + work.text_pair * ((text + image) ** 2 - pairs)
    )
    return total / sequences if work.shared else total


def work_of(card: ControlCard) -> ControlWork:
    """As a ControlNet's card tells; where an older worker tells its size alone, each weight meets every token."""
    if card.work is not None:
        return card.work
    return of_weights(card.weight_bytes, shared=card.kind is ControlKind.FLUX)


def of_weights(weight_bytes: float, *, shared: bool) -> ControlWork:
    """The work of a ControlNet whose size alone is known: each weight meets every token."""
    weights = weight_bytes / VALUE_BYTES
    return ControlWork(text=weights, image=weights, shared=shared)
