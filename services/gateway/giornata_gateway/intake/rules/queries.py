"""What a query says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from giornata.wire.errors import BadRequest, InvalidField

MAX_DIGITS: Final = 9
"""Digits of a number in a query; Python reads no more than a few thousand."""


def query_number(query: Mapping[str, str], name: str, default: int, most: int, least: int = 0) -> int:
    """A whole number of a query.

    Raises:
        InvalidField: it is none, or beyond the limits.
    """
    text = query.get(name, str(default))
    if len(text) > MAX_DIGITS or not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise InvalidField(
            "The number is not accepted.", field=name, received=text, accepted=f"{least} to {most}"
        )
    return int(text)


def check_query(query: Iterable[str], *accepted: str) -> None:
    """BadRequest where a query names something else than is accepted."""
    unknown = set(query) - set(accepted)
    if unknown:
        raise BadRequest(
            "Unknown query parameter.",
            received=", ".join(sorted(unknown)),
            accepted=", ".join(accepted) or "none",
        )
