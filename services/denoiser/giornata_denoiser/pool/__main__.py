"""``python -m giornata_denoiser.pool DESCRIPTOR``: a rank, whose leader is at the other end of an inherited socket."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Final

import structlog
import torch

from giornata.frames import PeerEnded
from giornata.logs import configure_logs
from giornata.runtime import keep_freed
from giornata.wire.errors import GiornataError
from giornata_denoiser.pool.messages import RankRefused, RankSetup, connect, unpack
from giornata_denoiser.pool.rank import Rank, loaded, tell

PARENT_DEATH_SIGNAL: Final = 1
"""`PR_SET_PDEATHSIG` of Linux's `prctl`."""

log = structlog.get_logger(__name__)


def ends_with_parent() -> None:
    """Have the kernel end this process with the one that started it; elsewhere than on Linux the socket alone does."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: int) -> int:
    """Be a rank whose leader is at the other end of the socket `descriptor`. Returns the exit status."""
    ends_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal tells the leader, too, which drains
    channel = connect(socket.socket(fileno=descriptor))
    opening: RankSetup = unpack(channel.receive())
    config = opening.config
    configure_logs(config.log_level, config.log_format, f"{config.instance}/{opening.me}")
    try:
        if config.torch_device().type == "cpu":
            keep_freed()
        if opening.threads is not None:
            torch.set_num_threads(opening.threads)
        Rank(channel, on_end=lambda: os._exit(1)).run(loaded(opening))
    except PeerEnded:
        return 1
    except GiornataError as error:
        tell(channel, RankRefused(error.body()))
        log.warning("rank_refused", device=config.device, error=str(error))
        return 1
    except Exception:  # the process's edge: logged, and told by its end
        log.exception("rank_failed", device=config.device)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
