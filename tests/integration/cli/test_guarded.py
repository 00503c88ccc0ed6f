"""Commands over a server that asks for passwords: ``giornata quarantine`` and ``giornata top``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from giornata.bus import bus, streams
from giornata.bus.bus import publish_state
from giornata.nats_users import password_file
from giornata.records import Quarantine
from giornata.wire.errors import AttemptsExhausted
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName, WorkerState
from giornata_router.job_records import accepted
from giornata_tools.cli.app import cli
from tests.fakes.fleet import state_of
from tests.integration.cli.conftest import Run
from tests.integration.nats_server import NatsServer
from tests.integration.router.bench import make_job
from tests.patience import HUNG_S

CAUSES = ("attempt 1 on d1: the worker fell silent", "attempt 2 on d2: the worker fell silent")
Guarded = tuple[NatsServer, Path]


def given_up() -> JobRecord:
    record = accepted(make_job(n=2))
    error = AttemptsExhausted("2 workers were lost.").body()
    return record.model_copy(update={"state": JobState.FAILED, "causes": CAUSES, "error": error})


async def keep(guarded: Guarded, *records: JobRecord) -> None:
    server, users = guarded
    router = password_file(users, NatsRole.ROUTER)
    async with bus.connect(server.url, "r", user=NatsRole.ROUTER, password_file=router) as connected:
        await streams.ensure(connected.jetstream, replicas=1, events_ttl_s=60)
        kept = await Quarantine.open(connected.jetstream)
        for record in records:
            await kept.put(record)


@pytest.fixture
def quarantine(guarded_nats: Guarded, run: Run) -> Run:
    """Runs the command as the operator, or as another user: ``await quarantine("list", user=None)``."""
    server, users = guarded_nats

    def run_as(*words: str, user: NatsRole | None = NatsRole.OPERATOR) -> Awaitable[Result]:
        login = ("--password-file", str(password_file(users, user))) if user else ()
        return run("quarantine", *words, "--nats", server.url, *login)

    return run_as


async def test_what_was_given_up_is_listed_shown_and_released(guarded_nats: Guarded, quarantine: Run) -> None:
    records = sorted((given_up(), given_up()), key=lambda record: record.job.job_id)
    ids = [record.job.job_id for record in records]
    await keep(guarded_nats, *records)
    listed = json.loads((await quarantine("list", "--json")).stdout)
    assert [line["job_id"] for line in listed] == ids
    assert [line["causes"] for line in listed] == [list(CAUSES)] * 2
    assert [line["pictures"] for line in listed] == [2, 2]
    table = (await quarantine("list")).stdout
    assert all(job_id in table for job_id in ids)
    assert "attempt 2 on d2" in table
    shown = (await quarantine("show", ids[0])).stdout
    assert all(told in shown for told in (ids[0], *CAUSES, "attempts_exhausted", "a red star"))
    whole = await quarantine("show", ids[0], "--json")
    assert JobRecord.model_validate_json(whole.stdout) == records[0]
    assert (await quarantine("release", ids[0])).exit_code == 0
    left = json.loads((await quarantine("list", "--json")).stdout)
    assert [line["job_id"] for line in left] == [ids[1]]
    released = json.loads((await quarantine("release", ids[1], "--json")).stdout)
    assert released["job_id"] == ids[1]
    empty = await quarantine("list")
    assert (empty.exit_code, empty.stdout) == (0, "")


@pytest.mark.parametrize(("command", "job_id"), [("show", "job_unknown"), ("release", "no subject>")])
async def test_a_job_that_is_not_there_is_told(
    guarded_nats: Guarded, quarantine: Run, command: str, job_id: str
) -> None:
    await keep(guarded_nats)
    told = await quarantine(command, job_id)
    assert told.exit_code == 1
    assert "There is no job with this id" in told.stderr


@pytest.mark.usefixtures("impatient")
async def test_it_is_the_operators_alone(guarded_nats: Guarded, quarantine: Run) -> None:
    await keep(guarded_nats, given_up())
    anonymous = await quarantine("list", user=None)
    assert (anonymous.exit_code, anonymous.stdout) == (1, "")
    assert "operator" in anonymous.stderr
    observer = await quarantine("list", user=NatsRole.OBSERVER)
    assert (observer.exit_code, observer.stdout) == (1, "")
    assert "does not let us in" in observer.stderr


async def test_where_no_router_has_run_it_says_so(quarantine: Run) -> None:
    told = await quarantine("list")
    assert told.exit_code == 1
    assert "no router has run" in told.stderr


def test_a_wrong_address_is_a_mistake_in_the_command_line() -> None:
    assert CliRunner().invoke(cli, ["quarantine", "list", "--nats", "http://x"]).exit_code == 2


# ``giornata top`` over a server that asks for passwords.


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
            await publish_state(connected, state_of(ServiceName.DENOISER, "d1", worker=worker))
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
