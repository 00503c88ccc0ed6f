"""Which rows are open here, and which denoisers may ask for their steps. On the event loop, but for what says so."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import structlog

from giornata.control.link.listener import among
from giornata.wire.errors import ControlNetUnavailable, Overloaded
from giornata_controlnet.open_row import OpenRow

TOKEN_BYTES: Final = 32

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class _PendingRow:
    """A row that is being opened."""

    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False
    """Whether the row was closed meanwhile."""


@dataclass(eq=False)
class _TrackedRow:
    """A row that is open."""

    row: OpenRow
    used_s: float
    """When it was opened, or last asked for a step."""


class OpenRowTable:
    """Open rows by key, at most `capacity`; a row without a step for `idle_s` is closed.

    Args:
        capacity: see above.
        idle_s: see above.
        clock: monotonic seconds.
    """

    def __init__(self, capacity: int, idle_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._capacity, self._idle_s, self._clock = capacity, idle_s, clock
        self._rows: dict[str, _TrackedRow] = {}
        self._opening: dict[str, _PendingRow] = {}
        self._tokens: dict[str, str] = {}
        """By denoiser."""
        self._changed = asyncio.Event()
        """Set when a row was opened or closed."""
        self._draining = False

    def __len__(self) -> int:
        """Rows that are open, or being opened."""
        return len(self._rows) + len(self._opening)

    def token(self, denoiser: str) -> str:
        """What opens the data path to a denoiser: the same while it has rows, and a connection."""
        if denoiser not in self._tokens:
            self._tokens[denoiser] = secrets.token_urlsafe(TOKEN_BYTES)
        return self._tokens[denoiser]

    def admits(self, token: str) -> bool:
        """Whether a denoiser was given this token. Any thread may ask."""
        return among(token, tuple(self._tokens.values()))

    def find(self, key: str, token: str) -> OpenRow | None:
        """The row, if it is open to the denoiser with this token, which uses it now. Any thread may ask."""
        kept = self._rows.get(key)
        if kept is None or not among(token, (self._tokens.get(kept.row.denoiser, ""),)):
            return None
        kept.used_s = self._clock()
        return kept.row

    async def open(self, key: str, denoiser: str, make: Callable[[], Awaitable[OpenRow]]) -> OpenRow:
        """The row of this key: one that is open to this denoiser, else what `make` makes.

        Raises:
            Overloaded: as many rows are open as may be.
            ControlNetUnavailable: this instance stops; or the row was closed while it was being opened.
        """
        while (others := self._opening.get(key)) is not None:
            await others.ended.wait()
        if (kept := self._rows.get(key)) is not None and kept.row.denoiser == denoiser:
            kept.used_s = self._clock()
            return kept.row
        if self._draining:
            raise ControlNetUnavailable("This ControlNet instance is stopping.")
        if kept is None and len(self) >= self._capacity:
            raise Overloaded(
                "This ControlNet instance has as many rows open as it may.",
                received=len(self),
                accepted=str(self._capacity),
            )
        self.close(key)
        opening = self._opening[key] = _PendingRow()
        try:
            made = await make()
        finally:
            del self._opening[key]
            opening.ended.set()
            self._changed.set()
        if opening.closed:
            made.pins.close()
            raise ControlNetUnavailable("The row was closed while it was being opened.")
        self._rows[key] = _TrackedRow(made, self._clock())
        self._changed.set()
        return made

    def close(self, key: str) -> bool:
        """Forget a row; whether it was open, or being opened."""
        opening, kept = self._opening.get(key), self._rows.pop(key, None)
        if opening is not None:
            opening.closed = True
        if kept is not None:
            kept.row.pins.close()
            self._changed.set()
        return kept is not None or opening is not None

    def leave(self, token: str) -> None:
        """The denoiser with this token has no connection any more: it has to open its rows again."""
        for denoiser in [name for name, given in self._tokens.items() if among(token, (given,))]:
            del self._tokens[denoiser]
            for key in [key for key, kept in self._rows.items() if kept.row.denoiser == denoiser]:
                log.info("row_left", row=key, denoiser=denoiser)
                self.close(key)

    async def expire(self) -> None:
        """Close rows that have been idle for too long; runs until it is cancelled."""
        while True:
            self._changed.clear()
            now = self._clock()
            for key in [key for key, kept in self._rows.items() if kept.used_s + self._idle_s <= now]:
                log.warning("row_idle", row=key, idle_s=self._idle_s)
                self.close(key)
            due_s = min((kept.used_s for kept in self._rows.values()), default=None)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_s is None else due_s + self._idle_s - now):
                    await self._changed.wait()

    async def drained(self) -> None:
        """Open no row any more, and return when none is left."""
        self._draining = True
        while len(self):
            self._changed.clear()
            await self._changed.wait()
