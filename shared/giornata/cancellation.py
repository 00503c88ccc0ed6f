"""Cancellation that something below has lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


def heed_cancel() -> None:
    """Raise what Python 3.11's wait_for, which nats-py uses, may have swallowed: that this task is cancelled.

    A task that went on would wait for ever, or begin tasks in a group that ends.
    """
    if _cancels():
        raise asyncio.CancelledError


@contextmanager
def heeding_cancel() -> Iterator[None]:
    """Raise on leaving if the task was cancelled inside and did not notice, as :func:`heed_cancel`.

    A task that was cancelled before, and puts things in order, goes on.
    """
    before = _cancels()
    try:
        yield
    except Exception as error:  # a failure does not hide the cancellation that came with it
        if _cancels() > before:
            raise asyncio.CancelledError from error
        raise
    if _cancels() > before:
        raise asyncio.CancelledError


def _cancels() -> int:
    """How often the running task was cancelled."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
