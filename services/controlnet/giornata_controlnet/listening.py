"""Where an instance listens for steps, and how denoisers reach it."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from giornata.control.link.asking import ControlStepRequest
from giornata.control.link.listener import Listener
from giornata.machine import host_name
from giornata.scratch import scratch_folder
from giornata.wire.controlnets import DataPath, OpenControl
from giornata.wire.errors import ControlNetUnavailable, Failed
from giornata_controlnet.config import ControlNetConfig
from giornata_controlnet.rows import OpenRowTable

SUFFIX: Final = ".sock"


@contextmanager
def listening(
    config: ControlNetConfig,
    rows: OpenRowTable,
    asked: Callable[[ControlStepRequest], None],
    left: Callable[[str], object],
) -> Iterator[Mapping[DataPath, str]]:
    """Listen within the context; gives the addresses as denoisers are told them.

    Raises:
        Failed: at an address nothing can be listened to.
    """
    with ExitStack() as stack:
        folder = config.control_socket
        if folder is None:
            folder = stack.enter_context(scratch_folder())
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _sweep(folder)
            unix = folder.absolute() / f"{secrets.token_hex(6)}{SUFFIX}"
            listener = Listener(
                rows.admits, asked, unix=unix, tcp=config.tcp, device=config.torch_device(), left=left
            )
            stack.enter_context(listener)
        except OSError as error:
            raise Failed(
                f"Steps cannot be listened for: {error}",
                received=f"{folder}, {config.control_address or 'no TCP'}",
            ) from error
        yield {
            path: config.advertised(address) if path is DataPath.TCP else address
            for path, address in listener.addresses.items()
        }


def path_of(request: OpenControl, addresses: Mapping[DataPath, str]) -> DataPath:
    """The best of the paths that a denoiser offers and this instance has; memory is shared within a host alone.

    Raises:
        ControlNetUnavailable: there is none.
    """
    here = request.host == host_name()
    able = [path for path in addresses if here or path is DataPath.TCP]
    for path in request.paths:
        if path in able:
            return path
    raise ControlNetUnavailable(
        "The denoiser and this ControlNet instance have no data path in common.",
        received=", ".join(request.paths),
        accepted=", ".join(able) or "denoisers of this host",
    )


def _sweep(folder: Path) -> None:
    """Remove sockets of processes that were killed."""
    for path in folder.glob(f"*{SUFFIX}"):
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except OSError:
                path.unlink(missing_ok=True)
