"""Where the gateways of a stack listen."""

from __future__ import annotations

from pathlib import Path

from giornata_tools.launcher import commands


class GatewayPorts:
    """Ports by gateway; the port of a gateway that ended goes to its successor.

    Args:
        host: that all gateways listen on.
        port: of the first gateway; 0 for any free one.
        folder: of the files that gateways write their ports to.
    """

    def __init__(self, host: str, port: int, folder: Path) -> None:
        self._host, self._folder = host, folder
        self._vacant = [port]
        self._requested: dict[str, int] = {}

    def flags(self, gateway: str) -> tuple[str, ...]:
        """Flags of a gateway that is to be started."""
        port = self._requested[gateway] = self._vacant.pop() if self._vacant else 0
        return commands.gateway_flags(self._host, port, self._file(gateway))

    def url(self, gateway: str) -> str | None:
        """REST address of a gateway; None before it listens."""
        port = self._port(gateway)
        return f"http://{self._host}:{port}" if port else None

    def vacate(self, instance: str) -> None:
        """Give the port of `instance` away, which has ended; other services than gateways have none."""
        if instance in self._requested:
            self._vacant.append(self._port(instance) or self._requested[instance])

    def _port(self, gateway: str) -> int | None:
        try:
            return int(self._file(gateway).read_text())
        except (FileNotFoundError, ValueError):  # not written yet, or not whole
            return None

    def _file(self, gateway: str) -> Path:
        return self._folder / f"{gateway}.port"
