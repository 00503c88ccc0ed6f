from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from giornata.wire.errors import InvalidField
from giornata_gateway.http.body import frame
from giornata_gateway.http.requests import last_event_id
from giornata_gateway.http.stream import HEARTBEAT
from giornata_gateway.views.answers import ErrorDetail
from giornata_gateway.views.jobs import ErrorEvent


@given(st.text(), st.none() | st.integers(1, 2**60))
def test_a_frame_is_one_event_whatever_the_text(message: str, sequence: int | None) -> None:
    detail = ErrorDetail(code="x", message=message.encode("utf-8", "replace").decode(), type="server_error")
    lines = frame("error", ErrorEvent(error=detail), sequence).decode().split("\n")
    assert lines[-2:] == ["", ""]
    fields = dict(line.split(": ", 1) for line in lines[:-2])
    assert fields.get("id") == (None if sequence is None else str(sequence))
    assert fields["event"] == "error"
    assert json.loads(fields["data"])["error"]["message"] == detail.message


def test_openais_client_passes_over_heartbeats() -> None:
    assert HEARTBEAT.startswith(b":")
    event = ErrorEvent(error=ErrorDetail(code="x", message="y", type="server_error"))
    sent = [frame("error", event, 7), HEARTBEAT, HEARTBEAT, frame("error", event), HEARTBEAT]
    read = list(SSEDecoder().iter_bytes(iter(sent)))
    assert [one.json()["error"]["code"] for one in read] == ["x", "x"]


def test_last_event_id() -> None:
    assert last_event_id({}) == last_event_id({"Last-Event-ID": ""}) == 0
    assert last_event_id({"Last-Event-ID": "17"}) == 17
    for header in ("-1", "1.0", "x", "9" * 30, "1\n"):
        with pytest.raises(InvalidField):
            last_event_id({"Last-Event-ID": header})
