"""The settings of a ControlNet service."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pydantic import Field, field_validator

from giornata.checkpoints import DeviceConfig
from giornata.control.layout import parse_checkpoints
from giornata.model_cards import CONTEXT_BYTES, USABLE
from giornata.runtime import memory_bytes

if TYPE_CHECKING:
    from giornata.gpus import DeviceLedger

MEMORY_SHARE: Final = 2
"""ControlNets that no row uses may take one part in so many of the device's memory by default."""
SOCKET_FOLDER_BYTES: Final = 80
"""Longest path of the socket's folder; the kernel takes 107 bytes with the socket's name."""
ANY: Final = frozenset({"", "0.0.0.0", "::"})  # noqa: S104 - compared, not bound
"""Hosts at which a process listens and which no other process can name."""


class ControlNetConfig(DeviceConfig):
    """Configuration of a ControlNet service."""

    controlnets: str = Field(
        description="ControlNets that this process computes: NAME=CHECKPOINT, separated by commas; a checkpoint is a "
        "local diffusers folder or a hub id. A ControlNet service needs some."
    )
    control_memory_mb: int | None = Field(
        None,
        ge=0,
        description="Weights on the device, in MiB, the least recently used out first; those that open rows use never "
        "go, and may exceed it. Default half of the GPU's memory that is free at the start and not stated by "
        "others, or of the machine's.",
    )
    control_loads: ClassVar[int] = 2
    """ControlNets that are loaded at a time."""
    control_rows: ClassVar[int] = 64
    """Most rows that are open at a time."""
    control_tokens: ClassVar[int] = 65_536
    """Most image tokens of one forward, counted for each ControlNet; a larger step runs alone."""
    control_idle_s: ClassVar[float] = 120.0
    """A row without a step for so long is closed; its denoiser opens it again when it needs it."""
    control_socket: Path | None = Field(
        None,
        description="Folder of the Unix socket for denoisers of this host, made if need be; containers that are to "
        "use it share it. Default a temporary one.",
    )
    control_address: str = Field(
        "",
        description="Where denoisers of other hosts are listened to, where there are some, as HOST:PORT, and "
        "how they reach it; with 0.0.0.0 or [::] by this machine's name; port 0 is any that is free. Default "
        "nowhere.",
    )

    @field_validator("controlnets")
    @classmethod
    def _are_named(cls, value: str) -> str:
        if not parse_checkpoints(value):
            raise ValueError("at least one ControlNet is needed, as NAME=CHECKPOINT")
        return value

    @field_validator("control_socket")
    @classmethod
    def _fits_a_socket(cls, value: Path | None) -> Path | None:
        if value is not None and len(bytes(value.absolute())) > SOCKET_FOLDER_BYTES:
            raise ValueError(f"the path of a socket's folder has at most {SOCKET_FOLDER_BYTES} bytes")
        return value

    @field_validator("control_address")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        _, colon, port = value.rpartition(":")
        if value and (not colon or not port.isdecimal() or int(port) > 65535):
            raise ValueError(f"an address is host:port with a port from 0 to 65535, received {value[:80]!r}")
        return value

    def budget_bytes(self, ledger: DeviceLedger) -> int:
        """State in the `ledger` the bytes that weights may take on the device, beside what others have stated."""
        import torch

        ledger.state(CONTEXT_BYTES)
        whole, device = memory_bytes(), self.torch_device()
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            whole = max(0, min(free, int(USABLE * total) - CONTEXT_BYTES - ledger.others_bytes()))
        asked = self.control_memory_mb
        budget = whole // MEMORY_SHARE if asked is None else asked << 20
        ledger.state(CONTEXT_BYTES + budget)
        return budget

    @property
    def tcp(self) -> tuple[str, int] | None:
        """Return host and port to listen at, port 0 for any that is free; None for nowhere."""
        host, colon, port = self.control_address.rpartition(":")
        return (host.strip("[]"), int(port)) if colon else None

    def advertised(self, bound: str) -> str:
        """``host:port`` by which denoisers of other hosts reach what is `bound`, ``host:port``."""
        host, _, port = bound.rpartition(":")
        if host.strip("[]") in ANY:
            host = socket.gethostname()
        return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
