"""Server-sent events as bytes. Pure; the format is that of the WHATWG HTML standard, section 9.2."""

from __future__ import annotations

import re

from pydantic import BaseModel

from giornata.wire.errors import InvalidField

HEARTBEAT = b": still working\n\n"
"""A comment; keeps proxies from closing a quiet connection."""
GO_ON_ELSEWHERE = b": this gateway leaves; another one goes on after your Last-Event-ID\nretry: 500\n\n"
"""The end of a stream whose job goes on: no error, so that clients connect again, by the standard after `retry` ms."""

_SEQUENCE = re.compile(r"[0-9]{1,18}\Z")


def frame(event: str, data: BaseModel, sequence: int | None = None) -> bytes:
    """One event. JSON has no raw line breaks, so one data line holds it.

    Args:
        event: its type.
        data: becomes JSON; None fields are left out.
        sequence: becomes its id, to which ``Last-Event-ID`` refers.
    """
    head = f"event: {event}\n" if sequence is None else f"id: {sequence}\nevent: {event}\n"
    return f"{head}data: {data.model_dump_json(exclude_none=True)}\n\n".encode()


def last_event_id(header: str | None) -> int:
    """Sequence number in a ``Last-Event-ID`` header; 0 without one.

    Raises:
        InvalidField: it is not an id that this server gave.
    """
    if not header:
        return 0
    if not _SEQUENCE.match(header):
        raise InvalidField(
            "Last-Event-ID is not an id of this stream.", field="Last-Event-ID", received=header
        )
    return int(header)
