"""A terminal obeys none of the texts that a server sends."""

from __future__ import annotations

import json
from typing import Final

import pytest

from giornata.wire.errors import ErrorBody
from giornata_tools.doors import http_door
from giornata_tools.doors.edits import sentence

EVIL: Final = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ehat"


def test_an_error_is_told_without_escapes() -> None:
    told = sentence(ErrorBody(code="invalid_field", message=EVIL, received=EVIL, accepted=EVIL))
    assert told.isprintable()
    assert told.count("owned") == 3


@pytest.mark.parametrize("nested", [EVIL, [EVIL], {"name": [{"inner": EVIL}]}])
def test_answers_of_a_gateway_hold_no_escapes(nested: object) -> None:
    told = http_door._object(json.dumps({"value": nested, "n": 1, "lines": "a\nb", "none": None}))
    assert str(told["value"]).isprintable()
    assert (told["n"], told["lines"], told["none"]) == (1, "a\nb", None)
