"""Messages of the work queue that this version cannot read: another version accepted them, or they are damaged."""

from __future__ import annotations

import asyncio
from typing import Final

import nats.errors
import structlog
from nats.aio.msg import Msg

from giornata.wire.errors import GiornataError
from giornata.wire.messages import IDEMPOTENCY_HEADER

KEPT_S: Final = 24 * 3600.0
"""An unreadable message is kept for the longest budget. No client waits after that, and the record is gone too."""

log = structlog.get_logger(__name__)


class UnreadableMessages:
    """Holds messages without a place in the queue, for a leader that can read them.

    `tasks` owns the wait for the end.
    """

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._held: dict[int, Msg] = {}
        """The messages, by their sequence number in the stream."""

    def __len__(self) -> int:
        return len(self._held)

    def count(self, subject: str, last: int) -> int:
        """Messages of a subject that are held, up to sequence number `last`."""
        return sum(s <= last and message.subject == subject for s, message in self._held.items())

    def hold(self, message: Msg, error: GiornataError) -> None:
        """Put a message aside, and tell of it once."""
        sequence = message.metadata.sequence.stream
        if sequence not in self._held:
            log.error("job_unreadable", job=_job_id(message), sequence=sequence, error=str(error))
            self._tasks.create_task(self._end(sequence), name="unreadable")
        self._held[sequence] = message

    async def _end(self, sequence: int) -> None:
        """Remove a message when the job's budget is surely over."""
        await asyncio.sleep(KEPT_S)
        message = self._held.pop(sequence)
        log.error("unreadable_job_removed", job=_job_id(message), sequence=sequence)
        try:
            await message.term()
        except nats.errors.Error as error:  # the next leader removes it
            log.warning("unreadable_job_not_removed", sequence=sequence, error=repr(error))


def _job_id(message: Msg) -> str | None:
    return (message.headers or {}).get(IDEMPOTENCY_HEADER)
