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
from tests.integration.cli.conftest import Run
from tests.integration.nats_server import NatsServer
from tests.patience import HUNG_S

Guarded = tuple[NatsServer, Path]


@pytest.fixture
def top(guarded_nats: Guarded, run: Run) -> Run:
    """Runs the command once as a user: ``await top(NatsRole.OBSERVER, "--json")``."""
    server, users = guarded_nats
    return lambda user, *words: run(
        "top", "--once", "--nats", server.url, "--password-file", str(password_file(users, user)), *words
    )


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


def speed(told: Result) -> float | None:
    """Steps per second of the only worker, where it was heard twice."""
    speed: float | None = json.loads(told.output)["workers"][0]["steps_per_s"]
    return speed


async def test_it_hears_what_workers_tell(guarded_nats: Guarded, top: Run) -> None:
    telling = asyncio.create_task(tell(guarded_nats))
    try:
        async with asyncio.timeout(
            HUNG_S
        ):  # on a machine that stands still it may hear nothing, or one message
            while (as_json := await top(NatsRole.OBSERVER, "--json")).exit_code or not speed(as_json):
                pass
            while (table := await top(NatsRole.OBSERVER)).exit_code:
                pass
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling
    [worker] = json.loads(as_json.output)["workers"]
    assert (worker["name"], worker["free_rows"]) == ("d1", 4)
    assert "denoiser 1/1" in table.output


async def test_where_nothing_is_heard_it_says_so(top: Run) -> None:
    result = await top(NatsRole.OBSERVER, "--interval", "0.5")
    assert result.exit_code == 1
    assert "No service tells of itself." in result.output


@pytest.mark.usefixtures("impatient")
async def test_another_users_password_is_refused(top: Run) -> None:
    result = await top(NatsRole.OPERATOR)
    assert result.exit_code == 1
    assert "does not let us in" in result.output


@pytest.mark.parametrize("words", [["--nats", "http://x"], ["--interval", "0"]])
def test_mistakes_are_told_at_once(words: list[str]) -> None:
    assert CliRunner().invoke(cli, ["top", *words]).exit_code == 2
