"""The LoRAs and ControlNets that a request names, as a job keeps them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from giornata.wire.adapters import (
    CONTROL_IMAGES,
    AskedControl,
    AskedLora,
    ControlCard,
    ControlInput,
    ControlUse,
    LoraUse,
    LoraWait,
)
from giornata.wire.errors import ControlNetNotFound, InvalidField, LoraMismatch, LoraNotReady
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard, Task

CONTROLNETS_FIELD: Final = "controlnets"

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
                field=f"{CONTROLNETS_FIELD}.image",
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
            accepted=f"leave it out, or name it as image of one of {CONTROLNETS_FIELD}: {unused[0]}",
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
            field=f"{CONTROLNETS_FIELD}.model",
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
        message,
        field=CONTROLNETS_FIELD,
        received=name,
        accepted=own or f"no ControlNet; leave {CONTROLNETS_FIELD} out",
    )


def _check_mode(asked: AskedControl, net: ControlCard) -> None:
    if not net.modes and asked.mode is not None:
        raise InvalidField(
            f"The ControlNet {net.name} has no modes: it is no union.",
            field=f"{CONTROLNETS_FIELD}.mode",
            received=asked.mode,
            accepted="leave mode out",
        )
    if net.modes and (asked.mode is None or asked.mode >= net.modes):
        raise InvalidField(
            f"The ControlNet {net.name} is a union of {net.modes} and needs a mode that it has.",
            field=f"{CONTROLNETS_FIELD}.mode",
            received="none" if asked.mode is None else asked.mode,
            accepted=f"0 to {net.modes - 1}",
        )


LORAS_FIELD: Final = "loras"
PROFILED_SCALE: Final = 1.0
"""At which pictures are compared. A LoRA that acts more strongly may change more, and is waited for."""


def use_of(
    asked: AskedLora, record: LoraRecord, card: ModelCard, wait: LoraWait, join: float | None = None
) -> LoraUse:
    """The LoRA of `record`, as it is now, for a job of the model `card` whose rows wait for it as `wait` says.

    `join` is the share of the steps after which the request has it join, if it says so.

    Raises:
        LoraNotReady: it is still being made, or could not be.
        LoraMismatch: it is for another model, or for another checkpoint of this name.
    """
    canonical = record.canonical
    if record.state is not LoraState.READY or canonical is None:
        raise _not_ready(record)
    if record.model != card.name:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} is for the model {record.model}, and the request for {card.name}.",
            field=LORAS_FIELD,
            received=f"a LoRA for {record.model}",
            accepted=f"a LoRA for {card.name}, or model={record.model}",
        )
    if canonical.model_digest != card.digest:
        raise LoraMismatch(
            f"The LoRA {record.lora_id} was checked against another checkpoint of {card.name} than is served.",
            field=LORAS_FIELD,
            received=f"checkpoint {canonical.model_digest[:12]}",
            accepted=f"checkpoint {card.digest[:12]}: delete the LoRA and upload it again",
        )
    bounded = wait is LoraWait.BOUNDED and 0 <= asked.scale <= PROFILED_SCALE
    allowed = (record.joins_within or 0.0) if bounded else 0.0
    return LoraUse(
        lora_id=record.lora_id,
        sha256=canonical.file.sha256,
        size_bytes=canonical.file.size_bytes,
        rank=canonical.rank,
        modules=canonical.modules,
        text_modules=canonical.text_modules,
        weights=canonical.weights,
        scale=asked.scale,
        joins_within=join or allowed,
    )


def _not_ready(record: LoraRecord) -> LoraNotReady:
    if record.error is not None:
        return LoraNotReady(
            f"The LoRA {record.lora_id} could not be used: {record.error.message}",
            field=LORAS_FIELD,
            received=f"{record.state} ({record.error.code})",
            accepted="a LoRA that is ready",
        )
    return LoraNotReady(
        f"The LoRA {record.lora_id} is not ready yet.",
        field=LORAS_FIELD,
        received=str(record.state),
        accepted=f"a LoRA that is ready; GET /v1/loras/{record.lora_id} tells",
    )
