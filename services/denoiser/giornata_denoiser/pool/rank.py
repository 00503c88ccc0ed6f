"""A rank: the process that computes on one device of a pool. It ends with its leader, however that ends.

Orders are computed one after the other in the main thread. A second thread reads them as they come, answers
pings, and aborts groups that have lost a member.
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from giornata_denoiser.pool.channel import Channel, ChannelClosed, Message
from giornata_denoiser.pool.messages import (
    AbortGroup,
    Order,
    Ping,
    Pong,
    RankReady,
    RankStepEnded,
    RankStepFailed,
    StepOrder,
    Stop,
)
from giornata_denoiser.pool.steps import RankSteps

Loaded = tuple[RankSteps, RankReady]
"""What computes, and what the leader is told first."""


class Rank:
    """Computes what comes over a channel.

    Args:
        channel: to the leader.
        on_end: told, in the reading thread, that the leader is gone; what is being computed then is for nobody.
    """

    def __init__(self, channel: Channel, on_end: Callable[[], object]) -> None:
        self._channel, self._on_end = channel, on_end
        self._orders: queue.SimpleQueue[tuple[Order, tuple[int, ...]]] = queue.SimpleQueue()
        self._steps: RankSteps | None = None
        self._reading = threading.Thread(target=self._read, name="orders", daemon=True)

    def run(self, loading: AbstractContextManager[Loaded]) -> None:
        """Load, then compute until the leader says stop. Pings are answered from now on.

        Raises:
            Ended: the leader is gone.
            torch.AcceleratorError: the device is lost.
        """
        self._reading.start()
        with loading as (steps, ready):
            self._steps = steps
            self._tell(ready)
            while not isinstance((order := self._orders.get())[0], Stop):
                self._obey(steps, *order)

    def close(self) -> None:
        """Let the leader go, and wait for the thread that reads."""
        self._channel.end()
        self._reading.join()
        self._channel.close()

    def _obey(self, steps: RankSteps, order: Order, files: tuple[int, ...]) -> None:
        if isinstance(order, StepOrder):
            answer, left = steps.compute(order)
            try:
                self._tell(answer, *(() if left is None else (left,)))
            finally:
                if left is not None:
                    os.close(left)
        elif not isinstance(order, AbortGroup | Ping | Stop):
            steps.take(order, files)

    def _tell(self, answer: RankReady | Pong | RankStepEnded | RankStepFailed, *files: int) -> None:
        self._channel.send(answer.model_dump_json().encode(), files)

    def _read(self) -> None:
        try:
            while True:
                order, files = opened(self._channel.receive())
                if isinstance(order, Ping):
                    self._tell(Pong(number=order.number))
                elif isinstance(order, AbortGroup):
                    if self._steps is not None:
                        self._steps.abort(order.devices, order.epoch)
                else:
                    self._orders.put((order, files))
                if isinstance(order, Stop):
                    return
        except ChannelClosed:
            self._on_end()


def opened(message: Message) -> tuple[Order, tuple[int, ...]]:
    """What the rank's own leader has sent."""
    order: Order = pickle.loads(message.data)  # noqa: S301 - of the process that started this one
    return order, message.files
