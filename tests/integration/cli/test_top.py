"""``giornata top`` over a server that asks for passwords."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from giornata.bus import bus
from giornata.bus.bus import publish_state
from giornata.nats_users import password_file
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, ServiceState, WorkerState
from giornata_tools.cli.app import cli
from tests.integration.nats_server import NatsServer

Guarded = tuple[NatsServer, Path]


async def run(guarded: Guarded, *words: str, user: NatsRole) -> Result:
    """The command in a thread, since it has an event loop of its own."""
    server, users = guarded
    login = ["--nats", server.url, "--password-file", str(password_file(users, user))]
    return await asyncio.to_thread(CliRunner().invoke, cli, ["top", "--once", *login, *words])


@pytest.fixture(autouse=True)
def _no_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set them."""
    monkeypatch.setattr("giornata_tools.terminal.run", lambda main: asyncio.run(main()))


async def tell(guarded: Guarded) -> None:
    """A denoiser's telemetry, until it is cancelled."""
    server, users = guarded
    password = password_file(users, NatsRole.DENOISER)
    async with bus.connect(server.url, "d", user=NatsRole.DENOISER, password_file=password) as connected:
        steps = 0
        while True:
            worker = WorkerState(capacity_rows=4, capacity_tokens=64, steps_total=steps)
            state = ServiceState(
                service=ServiceName.DENOISER, instance="d1", host="h", version="1", ready=True, worker=worker
            )
            await publish_state(connected, state)
            steps += 5
            await asyncio.sleep(0.1)


async def test_it_hears_what_workers_tell(guarded_nats: Guarded) -> None:
    telling = asyncio.create_task(tell(guarded_nats))
    try:
        as_json = await run(guarded_nats, "--json", user=NatsRole.OBSERVER)
        table = await run(guarded_nats, user=NatsRole.OBSERVER)
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling
    assert as_json.exit_code == 0, as_json.output
    [worker] = json.loads(as_json.output)["workers"]
    assert (worker["name"], worker["free_rows"]) == ("d1", 4)
    assert worker["steps_per_s"] > 0
    assert table.exit_code == 0
    assert "denoiser 1/1" in table.output


async def test_where_nothing_is_heard_it_says_so(guarded_nats: Guarded) -> None:
    result = await run(guarded_nats, "--interval", "0.5", user=NatsRole.OBSERVER)
    assert result.exit_code == 1
    assert "No service tells of itself." in result.output


@pytest.mark.usefixtures("impatient")
async def test_another_users_password_is_refused(guarded_nats: Guarded) -> None:
    result = await run(guarded_nats, user=NatsRole.OPERATOR)
    assert result.exit_code == 1
    assert "does not let us in" in result.output


@pytest.mark.parametrize("words", [["--nats", "http://x"], ["--interval", "0"]])
def test_mistakes_are_told_at_once(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["top", *words]).exit_code == 2
