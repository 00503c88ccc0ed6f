"""The instance's end of the data path: who connects, and what is asked."""

from __future__ import annotations

import hmac
import selectors
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

import structlog
import torch

from giornata.control.link.asking import ControlStepRequest
from giornata.control.link.serving import ControlLinkHandler
from giornata.control.link.sockets import FramedConnection
from giornata.wire.controlnets import DataPath

MAX_LINKS: Final = 256
"""Connections at a time; more are closed at once."""
BACKLOG: Final = 64

log = structlog.get_logger(__name__)


def among(token: str, tokens: Iterable[str]) -> bool:
    """Whether `token` is one of `tokens`, in a time that does not tell which, or how much of it is right."""
    found = False
    for each in tokens:
        found |= hmac.compare_digest(token.encode(), each.encode())
    return found


class Listener:
    """Takes connections of denoisers from entering to leaving the context, each in a thread of its own.

    Args:
        admits: whether a token opens a data path; compares as :func:`among` does. Asked in any thread.
        asked: takes each step in the thread that reads the connection, and only puts it into a queue.
        unix: path of the Unix socket; a file that is there is replaced. The folder should be this user's alone.
        tcp: host and port to listen at; port 0 is any that is free.
        device: where this instance computes. Where it is a GPU, denoisers may offer memory of theirs.
        left: is told, in any thread, of a token whose last connection has ended.
    """

    def __init__(
        self,
        admits: Callable[[str], bool],
        asked: Callable[[ControlStepRequest], None],
        *,
        unix: Path | None,
        tcp: tuple[str, int] | None,
        device: torch.device,
        left: Callable[[str], object] = lambda _: None,
    ) -> None:
        self._admits, self._asked, self._device, self._left = admits, asked, device, left
        self._connected: Counter[str] = Counter()
        """Connections by token."""
        self._counting = threading.Lock()
        self._unix, self._tcp = unix, tcp
        self._addresses: dict[DataPath, str] = {}
        self._serving: list[tuple[threading.Thread, ControlLinkHandler]] = []
        self._thread = threading.Thread(target=self._run, name="control-links")
        self._stack = ExitStack()

    @property
    def addresses(self) -> Mapping[DataPath, str]:
        """Where to connect, by path: a socket's path, or ``host:port`` with the host that was given."""
        return MappingProxyType(self._addresses)

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            OSError: at an address nothing can be listened to.
        """
        with ExitStack() as stack:
            self._selector = stack.enter_context(selectors.DefaultSelector())
            wakes, self._wake = (stack.enter_context(each) for each in socket.socketpair())
            self._selector.register(wakes, selectors.EVENT_READ, None)
            if self._unix is not None:
                self._listen_unix(self._unix, stack)
            if self._tcp is not None:
                self._listen_tcp(self._tcp, stack)
            self._stack = stack.pop_all()
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        """Close all connections and wait for all threads. What denoisers still wait for is lost to them."""
        self._wake.send(b"x")
        self._thread.join()
        for _, serving in self._serving:
            serving.interrupt()
        for thread, _ in self._serving:
            thread.join()
        self._stack.close()

    def _listen_unix(self, path: Path, stack: ExitStack) -> None:
        path.unlink(missing_ok=True)
        listening = stack.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(str(path))
        stack.callback(path.unlink, missing_ok=True)
        path.chmod(0o600)
        listening.listen(BACKLOG)
        paths = {DataPath.UNIX} | ({DataPath.CUDA} if self._device.type == "cuda" else set())
        self._addresses |= dict.fromkeys(paths, str(path))
        self._watch(listening, paths)

    def _listen_tcp(self, where: tuple[str, int], stack: ExitStack) -> None:
        host, port = where
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = stack.enter_context(socket.create_server((host, port), family=family, backlog=BACKLOG))
        shown = f"[{host}]" if ":" in host else host
        self._addresses[DataPath.TCP] = f"{shown}:{listening.getsockname()[1]}"
        self._watch(listening, {DataPath.TCP})

    def _watch(self, listening: socket.socket, paths: set[DataPath]) -> None:
        listening.settimeout(0)  # who connected may be gone again when it is taken
        self._selector.register(listening, selectors.EVENT_READ, (listening, frozenset(paths)))

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                listening, paths = key.data
                self._accept(listening, paths)

    def _accept(self, listening: socket.socket, paths: frozenset[DataPath]) -> None:
        try:
            connected, address = listening.accept()
        except OSError as error:
            log.warning("control_link_not_accepted", error=str(error))
            return
        self._serving = [(thread, serving) for thread, serving in self._serving if thread.is_alive()]
        if len(self._serving) >= MAX_LINKS:
            log.error("control_link_refused", peer=str(address), error=f"there are {MAX_LINKS} connections")
            connected.close()
            return
        connected.settimeout(None)
        name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "unix"
        serving = ControlLinkHandler(
            FramedConnection(connected),
            name,
            paths,
            self._admits,
            self._asked,
            device=self._device,
            counted=self._count,
        )
        thread = threading.Thread(target=serving.run, name=f"control-link {name}")
        thread.start()
        self._serving.append((thread, serving))

    def _count(self, token: str, change: int) -> None:
        """A connection with this token was opened, or has ended."""
        with self._counting:
            self._connected[token] += change
            last = not self._connected[token]
            self._connected += Counter()  # drops zeros
        if last:
            self._left(token)
