"""Stands for the Python that xdist starts for a worker: has it forked from the server of the run, and ends as it does.

``python -I -S tests/forked_worker.py -u -c CODE`` imports nothing that takes time. A worker whose stand-in is killed is
killed by the server.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import sys

STATUS = struct.Struct("q")
"""As :data:`multiprocessing.forkserver.SIGNED_STRUCT`, which takes 20 ms to import."""


def main() -> int:
    """Wait for the worker and return its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the controller's, which ends its workers
    code = sys.argv[-1]
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    requests.connect("\0" + os.environ["GIO_TEST_FORKS"])
    told, tells = socket.socketpair()
    message = json.dumps([["-c", code], dict(os.environ), os.getcwd()]).encode()  # noqa: PTH109 - pathlib takes time
    with tells:
        socket.send_fds(requests, [message], [0, 1, 2, tells.fileno()])
    os.close(0)
    os.close(1)  # the worker's alone, which tells its end by closing it
    told.recv(STATUS.size, socket.MSG_WAITALL)
    answer = told.recv(STATUS.size, socket.MSG_WAITALL)
    return abs(STATUS.unpack(answer)[0]) if answer else 1


if __name__ == "__main__":
    sys.exit(main())
