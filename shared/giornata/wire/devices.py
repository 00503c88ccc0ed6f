"""Devices of a host, as telemetry tells them."""

from __future__ import annotations

from giornata.wire.values import WireModel


class HostDevice(WireModel):
    """A GPU of a host."""

    device: str
    """As the process saw it before it took its own alone: ``cuda:3``."""
    id: str
    """What names it on the host, whoever looks: ``GPU-8f7d4a5c-…``."""
    claimed: bool = False
    """Whether the instance has claimed it; others may use one that is not."""
