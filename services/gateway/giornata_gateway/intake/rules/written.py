"""Pictures that are written as text in a JSON body."""

from __future__ import annotations

import base64
import binascii
import re

from giornata.wire.errors import InvalidField
from giornata.wire.references import REFERENCE, check_count
from giornata_gateway.intake.rules.forms import check_filled

_DATA_URL = re.compile(r"data:image/[a-z]+;base64,")
ACCEPTED = "a list of PNG, JPEG or WebP files, base64 or data URLs"


def decoded(given: object) -> tuple[bytes, ...]:
    """The files of the field `reference`: one text or a list of them, base64 or data URLs.

    InvalidField where it is something else, or holds too many.
    """
    texts = given if isinstance(given, list) else [given]
    check_count(len(texts))
    return tuple(_file(text) for text in texts)


def _file(text: object) -> bytes:
    if not isinstance(text, str):
        raise InvalidField(
            "A reference is not a text.", field=REFERENCE, received=type(text).__name__, accepted=ACCEPTED
        )
    start = _DATA_URL.match(text)
    try:
        data = base64.b64decode(text[start.end() if start else 0 :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidField(
            "A reference is not base64.",
            field=REFERENCE,
            received=f"{len(text)} characters ({error})",
            accepted=ACCEPTED,
        ) from error
    check_filled(data, REFERENCE)
    return data
