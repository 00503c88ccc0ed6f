"""The error of ControlNets that do not fit."""

from __future__ import annotations

from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase


class ControlMismatch(ValueError):
    """A ControlNet cannot act on a row: says why."""


def fits(card: ControlCard, base: ControlBase, *pairs: tuple[str, object, object]) -> None:
    """Compare what a ControlNet has with what a denoising network has: (what, the ControlNet's, the network's).

    Raises:
        ControlMismatch: it is one of another kind of network, or a pair differs.
    """
    if card.kind is not base.kind:
        raise ControlMismatch(
            f"the ControlNet {card.name} is one of {card.kind}, and the model is of {base.kind}"
        )
    for what, own, others in pairs:
        if own != others:
            raise ControlMismatch(
                f"the ControlNet {card.name} does not fit: {what} {own}, and the model's {others}"
            )
