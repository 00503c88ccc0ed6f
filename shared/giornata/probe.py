"""``python -m giornata.probe SERVICE``: exit 0 when an instance of SERVICE on this host tells that it is ready.

For container health checks. It listens to telemetry, so it sees what the rest of the fleet sees.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from pathlib import Path

from giornata.bus import bus
from giornata.wire import subjects
from giornata.wire.errors import GiornataError
from giornata.wire.permissions import User
from giornata.wire.workers import ServiceName, ServiceState


async def is_ready(
    nats_url: str, service: ServiceName, timeout_s: float, password_file: Path | None = None
) -> bool:
    """Whether an instance of `service` on this host says *ready* within `timeout_s`; asked as that service's user."""
    ready = asyncio.Event()

    def hear(state: ServiceState) -> None:
        if state.host == socket.gethostname() and state.ready and not state.draining:
            ready.set()

    async with (
        bus.connect(
            nats_url, "probe", user=User(service), password_file=password_file, timeout_s=timeout_s
        ) as connected,
        connected.listen(subjects.telemetry_of(service), ServiceState, hear),
    ):
        try:
            async with asyncio.timeout(timeout_s):
                await ready.wait()
        except TimeoutError:
            return False
    return True


def main() -> int:
    """Command line of the probe."""
    parser = argparse.ArgumentParser(prog="giornata.probe", description=__doc__)
    parser.add_argument("service", type=ServiceName, choices=list(ServiceName))
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds to listen (default 3)")
    arguments = parser.parse_args()
    url = os.environ.get("GIORNATA_NATS_URL", "nats://127.0.0.1:4222")
    password_file = os.environ.get("GIORNATA_NATS_PASSWORD_FILE")
    try:
        ready = asyncio.run(
            is_ready(
                url, arguments.service, arguments.timeout, Path(password_file) if password_file else None
            )
        )
    except GiornataError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not ready:
        sys.stderr.write(f"No {arguments.service} on this host says that it is ready.\n")
    return 0 if ready else 1


if __name__ == "__main__":
    sys.exit(main())
