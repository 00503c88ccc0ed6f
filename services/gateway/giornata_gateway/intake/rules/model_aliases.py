"""Other names by which requests call models: what clients of other servers send, such as `gpt-image-1`. Pure."""

from __future__ import annotations

import re
from typing import Final

from giornata.wire.requests import MODEL_NAME

_ALIAS: Final = re.compile(rf"({MODEL_NAME})=({MODEL_NAME})")


def aliases_in(text: str) -> dict[str, str]:
    """Model names by alias, of ``ALIAS=NAME`` with commas between; ValueError where it is not that."""
    aliases: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        found = _ALIAS.fullmatch(part)
        if found is None or found[1] in aliases:
            raise ValueError(f"an alias is written ALIAS=NAME, each alias once, and not {part!r}")
        aliases[found[1]] = found[2]
    return aliases
