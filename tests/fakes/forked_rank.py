"""Ranks of a pool whose processes are forked, where production starts Python for each."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from giornata_denoiser.pool.__main__ import main
from giornata_denoiser.pool.messages import ChannelClosed, RankSetup, pair
from giornata_denoiser.pool.ranks import SEND_S, LocalRankProcess
from tests.forked_processes import TorchProcess


class WaitedProcess(TorchProcess):
    """A process that is waited for as those of :mod:`subprocess` are."""

    wait = TorchProcess.join


class ForkedRankProcess(LocalRankProcess):
    """A rank on the CPU."""

    def __init__(self, opening: RankSetup, visible: str | None = None) -> None:
        assert visible is None
        self.channel, there = pair(SEND_S)
        process: Any = WaitedProcess(target=_run, args=(there, dict(os.environ)), daemon=True)
        with there:
            process.start()
        self._process = process
        with suppress(ChannelClosed):  # it has died already: its channel tells
            self.channel.send(pickle.dumps(opening))


def _run(there: socket.socket, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(there.detach()))
