"""Cancellation that something below has lost."""

from __future__ import annotations

import asyncio


def heed_cancel() -> None:
    """Raise what Python 3.11's wait_for, which nats-py uses, may have swallowed: that this task is cancelled.

    A task that went on would wait for ever, or begin tasks in a group that ends.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
