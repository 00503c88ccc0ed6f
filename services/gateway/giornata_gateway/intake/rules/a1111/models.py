"""How A1111 names models: `name [hash]`, or a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from giornata.wire.models import ModelCard

HASH_CHARACTERS: Final = 10
_LABEL: Final = re.compile(r"(?P<name>.*?)(?:\.(?:safetensors|ckpt|pt|pth))?(?:\s*\[[0-9A-Fa-f]*\])?")


def title_of(card: ModelCard) -> str:
    """What A1111's clients list and send back."""
    return f"{card.name} [{hash_of(card)}]"


def hash_of(card: ModelCard) -> str:
    """The short hash in a title: the first characters of the model's digest."""
    return card.digest[:HASH_CHARACTERS]


def unlabelled(label: str) -> str:
    """The name in a title, without suffix and hash."""
    found = _LABEL.fullmatch(label.strip())
    return label if found is None else found["name"]


def model_of(label: str, cards: Mapping[str, ModelCard]) -> str:
    """The name of the model that a title, a name or a hash means; what means none stays as it is."""
    by_hash = {known: card.name for card in cards.values() for known in (hash_of(card), card.digest)}
    return by_hash.get(label.strip(), unlabelled(label))
