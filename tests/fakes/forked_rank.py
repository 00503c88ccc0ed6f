"""Ranks of a pool whose processes are forked, where production starts Python for each."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from giornata_denoiser.pool.messages import RankSetup, connect
from giornata_denoiser.pool.rank import main
from giornata_denoiser.pool.ranks import LocalRankProcess
from giornata_denoiser.pool.state import parcel
from tests.forked_processes import TorchProcess


class WaitedProcess(TorchProcess):
    """A process that is waited for as those of :mod:`subprocess` are."""

    wait = TorchProcess.join


class ForkedRankProcess(LocalRankProcess):
    """A rank on the CPU."""

    def __init__(self, opening: RankSetup, visible: str | None = None) -> None:
        assert visible is None
        here, there = socket.socketpair()
        self.channel = connect(here)
        process: Any = WaitedProcess(target=_run, args=(there, dict(os.environ)), daemon=True)
        with there:
            process.start()
        self._process = process
        with suppress(OSError):  # it has died already: its channel tells
            self.channel.send(parcel(opening).frame)


def _run(there: socket.socket, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main(there.detach()))
