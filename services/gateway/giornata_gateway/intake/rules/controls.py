"""What a job keeps of the ControlNets that its request names. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from giornata.wire.adapters import CONTROL_IMAGES, AskedControl, ControlCard, ControlInput, ControlUse
from giornata.wire.errors import ControlNetNotFound, InvalidField
from giornata.wire.models import ModelCard, Task

FIELD: Final = "controlnets"

T = TypeVar("T")


def in_order(named: Mapping[str, T]) -> tuple[T, ...]:
    """Control images in the order of their names, which other names may stand between.

    InvalidField where one is left out between others.
    """
    given = [name for name in CONTROL_IMAGES if name in named]
    missing = [name for name in CONTROL_IMAGES[: len(given)] if name not in named]
    if missing:
        raise InvalidField(
            "The control images are not numbered from 0 on.",
            field=missing[0],
            received=", ".join(given),
            accepted=", ".join(CONTROL_IMAGES[: len(given)]),
        )
    return tuple(named[name] for name in given)


def check_images(asked: Sequence[AskedControl], count: int, task: Task) -> None:
    """Check that the ControlNets of a request see something, and that one of them sees each of `count` control images.

    InvalidField names what is missing, or not used.
    """
    for one in asked:
        if one.image is None and task is Task.GENERATE:
            raise InvalidField(
                f"A generation edits no picture, and so {one.annotator} has nothing to make a control image of.",
                field=f"{FIELD}.image",
                received="none",
                accepted=f"the number of a control image: 0 for {CONTROL_IMAGES[0]}",
            )
        if one.image is not None and one.image >= count:
            raise InvalidField(
                f"The ControlNet {one.model} needs a control image that the request does not bring.",
                field=CONTROL_IMAGES[one.image],
                received=f"{count} control images",
                accepted="a PNG, JPEG or WebP file",
            )
    unused = sorted(set(range(count)) - {one.image for one in asked})
    if unused:
        raise InvalidField(
            f"No ControlNet of the request sees {CONTROL_IMAGES[unused[0]]}.",
            field=CONTROL_IMAGES[unused[0]],
            received="a file",
            accepted=f"leave it out, or name it as image of one of {FIELD}: {unused[0]}",
        )


def control_use(
    asked: AskedControl, card: ModelCard, served: Mapping[str, Sequence[ControlCard]], task: Task
) -> ControlUse:
    """The ControlNet that a request for the model `card` names; `served` are ControlNets by model.

    Raises:
        ControlNetNotFound: the model is served without it; names the models that have it.
        InvalidField: the mode of a union ControlNet is missing or unknown, or another ControlNet has none; or it sees
            the mask, and a generation has none.
    """
    own = {net.name: net for net in served.get(card.name, ())}
    if asked.model not in own:
        raise _not_found(asked.model, card, served)
    net = own[asked.model]
    _check_mode(asked, net)
    if net.sees is ControlInput.MASKED and task is Task.GENERATE:
        raise InvalidField(
            f"The ControlNet {net.name} sees the mask of an edit, and a generation has none.",
            field=f"{FIELD}.model",
            received=net.name,
            accepted="another ControlNet, or an edit",
        )
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
