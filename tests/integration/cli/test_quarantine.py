"""``giornata quarantine`` over a server that asks for passwords: what is kept, what of one, and its removal."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from giornata.bus import bus, streams
from giornata.nats_users import password_file
from giornata.records import Quarantine
from giornata.wire.errors import AttemptsExhausted
from giornata.wire.jobs import JobRecord, JobState
from giornata.wire.subjects import NatsRole
from giornata_router.job_records import accepted
from giornata_tools.cli.app import cli
from tests.integration.nats_server import NatsServer
from tests.integration.router.bench import make_job

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


async def run(guarded: Guarded, *words: str, user: NatsRole | None = NatsRole.OPERATOR) -> Result:
    """The command in a thread, since it has an event loop of its own."""
    server, users = guarded
    login = ["--password-file", str(password_file(users, user))] if user else []
    command = ["quarantine", *words, "--nats", server.url, *login]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


@pytest.fixture(autouse=True)
def _no_signal_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the main thread may set them."""
    monkeypatch.setattr("giornata_tools.terminal.run", lambda main: asyncio.run(main()))


async def test_what_was_given_up_is_listed_shown_and_released(guarded_nats: Guarded) -> None:
    records = sorted((given_up(), given_up()), key=lambda record: record.job.job_id)
    ids = [record.job.job_id for record in records]
    await keep(guarded_nats, *records)
    listed = json.loads((await run(guarded_nats, "list", "--json")).stdout)
    assert [line["job_id"] for line in listed] == ids
    assert [line["causes"] for line in listed] == [list(CAUSES)] * 2
    assert [line["pictures"] for line in listed] == [2, 2]
    table = (await run(guarded_nats, "list")).stdout
    assert all(job_id in table for job_id in ids)
    assert "attempt 2 on d2" in table
    shown = (await run(guarded_nats, "show", ids[0])).stdout
    assert all(told in shown for told in (ids[0], *CAUSES, "attempts_exhausted", "a red star"))
    whole = await run(guarded_nats, "show", ids[0], "--json")
    assert JobRecord.model_validate_json(whole.stdout) == records[0]
    assert (await run(guarded_nats, "release", ids[0])).exit_code == 0
    left = json.loads((await run(guarded_nats, "list", "--json")).stdout)
    assert [line["job_id"] for line in left] == [ids[1]]
    released = json.loads((await run(guarded_nats, "release", ids[1], "--json")).stdout)
    assert released["job_id"] == ids[1]
    empty = await run(guarded_nats, "list")
    assert (empty.exit_code, empty.stdout) == (0, "")


@pytest.mark.parametrize("command", ["show", "release"])
@pytest.mark.parametrize("job_id", ["job_unknown", "no subject>"])
async def test_a_job_that_is_not_there_is_told(guarded_nats: Guarded, command: str, job_id: str) -> None:
    await keep(guarded_nats)
    told = await run(guarded_nats, command, job_id)
    assert told.exit_code == 1
    assert "There is no job with this id" in told.stderr


@pytest.mark.usefixtures("impatient")
async def test_it_is_the_operators_alone(guarded_nats: Guarded) -> None:
    await keep(guarded_nats, given_up())
    anonymous = await run(guarded_nats, "list", user=None)
    assert (anonymous.exit_code, anonymous.stdout) == (1, "")
    assert "operator" in anonymous.stderr
    observer = await run(guarded_nats, "list", user=NatsRole.OBSERVER)
    assert (observer.exit_code, observer.stdout) == (1, "")
    assert "does not let us in" in observer.stderr


async def test_where_no_router_has_run_it_says_so(guarded_nats: Guarded) -> None:
    told = await run(guarded_nats, "list")
    assert told.exit_code == 1
    assert "no router has run" in told.stderr


async def test_a_wrong_address_is_a_mistake_in_the_command_line(guarded_nats: Guarded) -> None:
    told = await asyncio.to_thread(CliRunner().invoke, cli, ["quarantine", "list", "--nats", "http://x"])
    assert told.exit_code == 2
