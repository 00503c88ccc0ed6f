"""What a job keeps of the ControlNets that its request names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from giornata.wire.adapters import AskedControl, ControlCard, ControlUse
from giornata.wire.errors import ControlNetNotFound, InvalidField
from giornata.wire.models import ModelCard

FIELD: Final = "controlnets"


def control_use(
    asked: AskedControl, card: ModelCard, served: Mapping[str, Sequence[ControlCard]]
) -> ControlUse:
    """The ControlNet that a request for the model `card` names; `served` are ControlNets by model.

    Raises:
        ControlNetNotFound: the model is served without it; names the models that have it.
        InvalidField: the mode of a union ControlNet is missing or unknown, or another ControlNet has none.
    """
    own = {net.name: net for net in served.get(card.name, ())}
    if asked.model not in own:
        raise _not_found(asked.model, card, served)
    net = own[asked.model]
    _check_mode(asked, net)
    return ControlUse(
        model=net.name,
        digest=net.digest,
        image=asked.image,
        annotator=asked.annotator,
        scale=asked.scale,
        start=asked.start,
        end=asked.end,
        mode=asked.mode,
        sees=net.sees,
    )


def _not_found(name: str, card: ModelCard, served: Mapping[str, Sequence[ControlCard]]) -> ControlNetNotFound:
    own = ", ".join(sorted(net.name for net in served.get(card.name, ())))
    others = sorted(model for model, nets in served.items() if any(net.name == name for net in nets))
    message = f"The model {card.name} ({card.family}) is served without the ControlNet {name}."
    if others:
        message += f" It belongs to {', '.join(others)}."
    return ControlNetNotFound(
        message, field=FIELD, received=name, accepted=own or f"no ControlNet; leave {FIELD} out"
    )


def _check_mode(asked: AskedControl, net: ControlCard) -> None:
    if not net.modes and asked.mode is not None:
        raise InvalidField(
            f"The ControlNet {net.name} has no modes: it is no union.",
            field=f"{FIELD}.mode",
            received=asked.mode,
            accepted="leave mode out",
        )
    if net.modes and (asked.mode is None or asked.mode >= net.modes):
        raise InvalidField(
            f"The ControlNet {net.name} is a union of {net.modes} and needs a mode that it has.",
            field=f"{FIELD}.mode",
            received="none" if asked.mode is None else asked.mode,
            accepted=f"0 to {net.modes - 1}",
        )
