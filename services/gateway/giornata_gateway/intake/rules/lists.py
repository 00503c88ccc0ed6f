"""Fields of a form that are lists: JSON in its text. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from giornata.wire.errors import InvalidField
from giornata.wire.structure import read_json

LISTS: Final[Mapping[str, str]] = {
    "loras": '[{"id": "lora_…", "scale": 1.0}]',
    "controlnets": '[{"model": "outline", "image": 0}]',
}
"""Fields that are lists, and an example of each."""


def with_lists(values: Mapping[str, object]) -> dict[str, object]:
    """The fields of a form with its lists read; other doors bring lists, which stay.

    InvalidField where the text of a list is not JSON.
    """
    read = dict(values)
    for name in LISTS.keys() & values.keys():
        given = values[name]
        if isinstance(given, str):
            read[name] = _parsed(name, given)
    return read


def _parsed(name: str, text: str) -> Any:
    try:
        return read_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField(
            f"{name} is not JSON: {str(error)[:100]}.",
            field=name,
            received=text[:100],
            accepted=f"JSON such as {LISTS[name]}",
        ) from error
