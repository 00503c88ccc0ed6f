"""Pictures that are written as text in a JSON body."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterator
from typing import Final

from giornata.wire.errors import InvalidField
from giornata.wire.references import REFERENCE, check_count
from giornata_gateway.intake.rules.forms import check_filled

_DATA_URL = re.compile(r"data:image/[a-z]+;base64,")
PIECE_CHARACTERS: Final = 64 << 10
ACCEPTED = "PNG, JPEG or WebP, as base64 or data URL"


def decoded(given: object) -> tuple[bytes, ...]:
    """The files of the field `reference`: one text or a list of them, base64 or data URLs.

    InvalidField where it is something else, or holds too many.
    """
    texts = given if isinstance(given, list) else [given]
    check_count(len(texts))
    return tuple(picture(text, REFERENCE) for text in texts)


def picture(text: object, field: str) -> bytes:
    """The file of a `field`, base64 or a data URL; InvalidField where it is something else."""
    if not isinstance(text, str):
        raise InvalidField(
            "A picture is not a text.", field=field, received=type(text).__name__, accepted=ACCEPTED
        )
    found = _DATA_URL.match(text)
    start = found.end() if found else 0
    try:
        data = b"".join(_pieces(text, start))
    except (binascii.Error, ValueError) as error:
        raise InvalidField(
            "A picture is not base64.",
            field=field,
            received=f"{len(text)} characters ({error})",
            accepted=ACCEPTED,
        ) from error
    check_filled(data, field)
    return data


def _pieces(text: str, start: int) -> Iterator[bytes]:
    """The bytes in base64, piece by piece: one call for all of it would hold up every other thread."""
    for at in range(start, len(text), PIECE_CHARACTERS):
        piece = binascii.a2b_base64(text[at : at + PIECE_CHARACTERS], strict_mode=True)
        if at + PIECE_CHARACTERS < len(text) and len(piece) * 4 != PIECE_CHARACTERS * 3:
            raise ValueError("padding before its end")
        yield piece
