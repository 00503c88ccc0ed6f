"""What a prompt of A1111 says beside its words: LoRAs, and weights that have no meaning here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Final, NamedTuple

from giornata.wire.adapters import MAX_SCALE, AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard

_TAG: Final = re.compile(r"<(\w+):([^<>]*)>")
_NUMBER: Final = r"(?:\d+(?:\.\d*)?|\.\d+)"
_WEIGHTS: Final = (
    (re.compile(rf"\([^()]*:\s*-?{_NUMBER}\s*\)"), "a weight"),
    (re.compile(rf"\[[^\[\]]*:\s*{_NUMBER}\s*\]"), "a change of the prompt between steps"),
)
"""Syntax that no sentence has by chance; round brackets alone are words like any others."""
ACCEPTED: Final = "<lora:NAME> or <lora:NAME:WEIGHT>"
SUFFIX: Final = ".safetensors"


class Tag(NamedTuple):
    """A LoRA that a prompt names."""

    name: str
    scale: float


def split(prompt: str, field: str) -> tuple[str, list[Tag]]:
    """The words of a prompt, and its LoRAs.

    InvalidField names the `field` where it holds other networks, weights, or a tag that cannot be read.
    """
    for pattern, what in _WEIGHTS:
        if found := pattern.search(prompt):
            raise InvalidField(
                f"The prompt holds {what}, and models read its words as they stand.",
                field=field,
                received=found.group(),
                accepted="words without weights",
            )
    tags = [_tag(found, field) for found in _TAG.finditer(prompt)]
    return (" ".join(_TAG.sub(" ", prompt).split()) if tags else prompt), tags


def named(tags: Sequence[Tag], records: Iterable[LoraRecord], card: ModelCard) -> tuple[AskedLora, ...]:
    """The LoRAs that `tags` name by their name or their id, among a tenant's `records`, the newest first.

    Of several with one name for the model `card`, the newest is meant. LoraNotFound names those that there are.
    """
    usable = [record for record in records if record.model == card.name and record.state is LoraState.READY]
    found = {name: record.lora_id for record in reversed(usable) for name in names_of(record)}
    for tag in tags:
        if tag.name not in found:
            raise LoraNotFound(
                f"The model {card.name} has no LoRA of this name.",
                field="prompt",
                received=tag.name,
                accepted=", ".join(sorted({names_of(record)[0] for record in usable}))
                or "no LoRA; none is ready for the model",
            )
    return tuple(AskedLora(id=found[tag.name], scale=tag.scale) for tag in tags)


def names_of(record: LoraRecord) -> list[str]:
    """What a prompt may call a LoRA, the shortest first: its owner's name without the file's suffix, and its id."""
    own = [] if record.name is None else [record.name.removesuffix(SUFFIX), record.name]
    return [*dict.fromkeys(own), record.lora_id]


def _tag(found: re.Match[str], field: str) -> Tag:
    kind, text = found.groups()
    name, *weights = text.split(":")
    scale = _number(weights[0]) if weights else 1.0
    if kind != "lora" or not name or len(weights) > 1 or scale is None or abs(scale) > MAX_SCALE:
        raise InvalidField(
            "A tag of the prompt is not accepted.",
            field=field,
            received=found.group(),
            accepted=f"{ACCEPTED}, a weight of {-MAX_SCALE:g} to {MAX_SCALE:g}",
        )
    return Tag(name, scale)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
