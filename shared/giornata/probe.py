"""``python -m giornata.probe SERVICE``: exit 0 when an instance of SERVICE on this host tells that it is ready.

It is a container's health check. It listens to telemetry, so it sees what the fleet sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import click

from giornata.bus import bus
from giornata.wire import subjects
from giornata.wire.errors import GiornataError
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState


async def is_ready(
    nats_url: str, service: ServiceName, timeout_s: float, password_file: Path | None = None
) -> bool:
    """Whether an instance of `service` on this host says *ready* within `timeout_s`; asked as that service's user."""
    ready = asyncio.Event()

    def hear(state: ServiceState) -> None:
        if state.host == socket.gethostname() and state.ready and not state.draining:
            ready.set()

    login = bus.connect(
        nats_url, "probe", user=NatsRole(service), password_file=password_file, timeout_s=timeout_s
    )
    async with login as connected, connected.listen(subjects.telemetry_of(service), ServiceState, hear):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ready.wait(), timeout_s)
    return ready.is_set()


@click.command(help=__doc__)
@click.argument("service", type=click.Choice([name.value for name in ServiceName]))
@click.option("--timeout", "timeout_s", default=3.0, show_default=True, help="Seconds to listen.")
@click.option("--nats-url", envvar="GIORNATA_NATS_URL", default="nats://127.0.0.1:4222", show_default=True)
@click.option("--nats-password-file", envvar="GIORNATA_NATS_PASSWORD_FILE", type=click.Path(path_type=Path))
def main(service: str, timeout_s: float, nats_url: str, nats_password_file: Path | None) -> None:
    """Command line of the probe."""
    try:
        ready = asyncio.run(is_ready(nats_url, ServiceName(service), timeout_s, nats_password_file))
    except GiornataError as error:
        raise click.ClickException(str(error)) from error
    if not ready:
        raise click.ClickException(f"No {service} on this host says that it is ready.")


if __name__ == "__main__":
    main()
