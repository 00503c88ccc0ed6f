"""Server-sent events from bytes as they come: section 9.2 of the HTML standard."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import aiohttp


@dataclass(frozen=True)
class ServerEvent:
    """One event."""

    kind: str
    data: str


class EventReader:
    """Feed it chunks cut anywhere; lines may end with LF or CRLF. A picture in a line is joined once, not per chunk."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []
        self._kind = ""
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """The events that `chunk` completes."""
        first, *others = chunk.split(b"\n")
        self._pending.append(first)
        for other in others:
            event = self._take(b"".join(self._pending).removesuffix(b"\r").decode())
            self._pending = [other]
            if event is not None:
                yield event

    def _take(self, line: str) -> ServerEvent | None:
        if not line:
            event = ServerEvent(self._kind or "message", "\n".join(self._data)) if self._data else None
            self._kind, self._data = "", []
            return event
        name, _, value = line.partition(":")  # a comment's name is empty
        if name == "event":
            self._kind = value.removeprefix(" ")
        elif name == "data":
            self._data.append(value.removeprefix(" "))
        return None


async def events(content: aiohttp.StreamReader) -> AsyncIterator[ServerEvent]:
    """The events of an answer's body."""
    reader = EventReader()
    async for chunk in content.iter_any():
        for event in reader.feed(chunk):
            yield event
