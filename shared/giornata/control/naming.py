"""The names under which ControlNets are configured, and the error of those that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

from giornata.wire.adapters import ControlCard
from giornata.wire.controlnets import ControlBase

# The error of ControlNets that do not fit.


class ControlMismatch(ValueError):
    """A ControlNet cannot act on a row: says why."""


def check_fits(card: ControlCard, base: ControlBase, *pairs: tuple[str, object, object]) -> None:
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


# How ControlNets are configured: the same at denoisers and at the ControlNet service. Pure.


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,95}")


def parse_checkpoints(configured: str) -> dict[str, str]:
    """Checkpoints by name, of ``NAME=CHECKPOINT,NAME=CHECKPOINT``; a checkpoint alone is called as its folder.

    ValueError where a name is given twice, or is none.
    """
    found: dict[str, str] = {}
    for entry in filter(None, (part.strip() for part in configured.split(","))):
        name, equals, checkpoint = entry.partition("=")
        if not equals:
            name, checkpoint = Path(entry).resolve().name, entry
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name of a ControlNet: letters, digits, _ . -")
        if name in found:
            raise ValueError(f"two ControlNets are called {name}")
        found[name] = checkpoint
    return found
