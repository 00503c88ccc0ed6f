"""Pictures that are written as text in a JSON body."""

from __future__ import annotations

import base64
import binascii
import re

from giornata.wire.errors import InvalidField
from giornata.wire.references import REFERENCE, check_count
from giornata_gateway.intake.rules.forms import check_filled

_DATA_URL = re.compile(r"data:image/[a-z]+;base64,")
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
    start = _DATA_URL.match(text)
    try:
        data = base64.b64decode(text[start.end() if start else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidField(
            "A picture is not base64.",
            field=field,
            received=f"{len(text)} characters ({error})",
            accepted=ACCEPTED,
        ) from error
    check_filled(data, field)
    return data
