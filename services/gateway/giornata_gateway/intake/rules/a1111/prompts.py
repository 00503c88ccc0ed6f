"""What a prompt of A1111 says beside its words: LoRAs, and syntax that no model here reads."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from math import isfinite
from typing import Final, NamedTuple

from giornata.wire.adapters import MAX_SCALE, AskedLora
from giornata.wire.errors import InvalidField, LoraNotFound
from giornata.wire.loras import LoraRecord, LoraState
from giornata.wire.models import ModelCard

_TAG: Final = re.compile(r"<(\w+):([^<>]*)>")
_JOINED: Final = re.compile(r"\b(?:AND|BREAK)\b")
_TOKENS: Final = re.compile(
    r"\\[()\[\]\\]|[(\[|]|:\s*([-+]?[.\d]+)\s*[)\]]|[)\]]|[^\\()\[\]|:]+|.", re.DOTALL
)
"""A1111's `re_attention`, with what ends or divides the brackets of a change between steps."""
_OPENING: Final = {")": "(", "]": "["}
ACCEPTED: Final = "<lora:NAME> or <lora:NAME:WEIGHT>"
SUFFIX: Final = ".safetensors"


class Emphasis(StrEnum):
    """How A1111's setting `emphasis` has brackets read."""

    ORIGINAL = "Original"
    NO_NORM = "No norm"
    """As ORIGINAL, they weight words: refused, unless the weight is 1."""
    IGNORE = "Ignore"
    """They are taken away, and the words in them stay."""
    NONE = "None"
    """They are characters like any others."""


class LoraTag(NamedTuple):
    """A LoRA that a prompt names."""

    name: str
    scale: float


def split(prompt: str, field: str, emphasis: Emphasis = Emphasis.ORIGINAL) -> tuple[str, list[LoraTag]]:
    """The words of a prompt without its escapes, and its LoRAs.

    InvalidField names the `field` where the prompt holds weights, changes between steps, AND, BREAK, other networks,
    or a tag that cannot be read.
    """
    tags = [_tag(found, field) for found in _TAG.finditer(prompt)]
    words = " ".join(_TAG.sub(" ", prompt).split()) if tags else prompt
    if found := _JOINED.search(words):
        word = found.group()
        what = "joins several prompts" if word == "AND" else "begins another part of the prompt"
        accepted = f"one prompt; the word itself in small letters: {word.lower()}"
        raise InvalidField(f"{word} {what}.", field=field, received=word, accepted=accepted)
    plain = _plain(words, field, emphasis)
    return (words if emphasis is Emphasis.NONE else plain), tags


def _plain(prompt: str, field: str, emphasis: Emphasis) -> str:
    """The prompt without the brackets that A1111 reads, and with those that are escaped."""
    kept: list[str] = []
    opened: dict[str, list[int]] = {"(": [], "[": []}
    divided: set[int] = set()
    weighted = emphasis in {Emphasis.ORIGINAL, Emphasis.NO_NORM}
    for found in _TOKENS.finditer(prompt):
        part, number = found[0], found[1]
        if part in opened:
            opened[part].append(found.start())
        elif part[0] == "\\" and len(part) > 1:
            kept.append(part[1])
        elif starts := opened.get(_OPENING.get(part[-1], "")):
            start = starts.pop()
            if part[-1] == "]" and (number or start in divided):
                raise _refused("changes its words between steps", field, prompt[start : found.end()])
            if weighted and _number(number or "") != 1 and prompt[start + 1 : found.start()].strip():
                raise _refused("weights some of its words", field, prompt[start : found.end()])
        else:
            if part == "|" and opened["["][-1:] > opened["("][-1:]:
                divided.add(opened["["][-1])
            kept.append(part)
    starts = sorted(opened["("] + opened["["])
    if weighted and starts and prompt[starts[0] + 1 :].strip():
        raise _refused("weights all words after a bracket", field, prompt[starts[0] :])
    return "".join(kept)


def _refused(what: str, field: str, received: str) -> InvalidField:
    return InvalidField(
        f"The prompt {what}, and models read its words as they stand.",
        field=field,
        received=received,
        accepted=r"words without such brackets, \( \) \[ \] for brackets as characters, or for weights "
        'override_settings.emphasis "Ignore" (words without their weights) or "None" (brackets as characters)',
    )


def named(tags: Sequence[LoraTag], records: Iterable[LoraRecord], card: ModelCard) -> tuple[AskedLora, ...]:
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


def _tag(found: re.Match[str], field: str) -> LoraTag:
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
    return LoraTag(name, scale)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if isfinite(number) else None
