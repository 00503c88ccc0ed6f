"""Fields without effect: what the header and the log tell of them."""

from __future__ import annotations

from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from giornata_gateway.http.ignored import IGNORED, NAME_CHARACTERS, TOLD, header_value, ignore


def test_fields_are_told_once_in_their_order_and_logged() -> None:
    request = make_mocked_request("POST", "/v1/images/edits")
    with capture_logs() as logs:
        ignore(request, ["style", "moderation"])
        ignore(request, ["moderation", "eta"])
        ignore(request, [])
    assert header_value(request[IGNORED]) == "style, moderation, eta"
    assert [entry["fields"] for entry in logs] == ["style, moderation", "style, moderation, eta"]


@given(st.lists(st.text(st.characters(), max_size=200), max_size=60))
def test_every_name_makes_a_header_that_is_one_line_of_ascii(names: list[str]) -> None:
    value = header_value(names)
    assert value.isascii()
    assert "\r" not in value
    assert "\n" not in value
    assert value.count(",") <= TOLD
    assert len(value) <= (TOLD + 1) * (3 * NAME_CHARACTERS + 2)
    assert ("more" in value.rpartition(", ")[2]) >= (len(names) > TOLD)
