"""Starting and ending rank processes, as a leader sees them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

from giornata.config import ENV_PREFIX
from giornata.gpus import VISIBLE
from giornata_denoiser.pool.channel import Channel, ChannelClosed, pair
from giornata_denoiser.pool.messages import RankSetup

SEND_S: Final = 5.0
"""How long a rank's reading thread may take in nothing, before the rank counts as stalled."""


class RankProcess(Protocol):
    """A rank that has been started."""

    @property
    def channel(self) -> Channel:
        """To it; ends when the rank does."""

    def kill(self) -> None:
        """End it at once; what it was computing is lost."""

    def join(self, within_s: float) -> None:
        """Wait for its end, which it has been told; kill it where it takes longer."""


Start = Callable[[int], RankProcess]
"""Starts the rank at this place among the devices. The calling thread outlives it."""


class LocalRankProcess:
    """A process of this program's; satisfies :class:`RankProcess`.

    Nothing of the service's configuration is in its arguments or environment. On a GPU, `visible` is the one that CUDA
    shows it (:func:`giornata.gpus.visible_alone`).
    """

    def __init__(self, opening: RankSetup, visible: str | None = None) -> None:
        self.channel, there = pair(SEND_S)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        if visible is not None:
            environment[VISIBLE] = visible
        descriptor = there.fileno()
        with there:
            self._process = subprocess.Popen(  # noqa: S603 - this program, with a number
                [sys.executable, "-m", "giornata_denoiser.pool", str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        with suppress(ChannelClosed):  # it has died already: its channel tells
            self.channel.send(pickle.dumps(opening))

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def kill(self) -> None:
        """See :class:`RankProcess`."""
        self._process.kill()
        self._process.wait()
        self.channel.close()

    def join(self, within_s: float) -> None:
        """See :class:`RankProcess`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        self.kill()
