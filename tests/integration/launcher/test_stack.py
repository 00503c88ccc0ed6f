"""The stack on real servers, with the two services that need no model: ready, killed, drained, orphaned."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from giornata import fleet
from giornata.blobs import RedisBlobs
from giornata.bus import bus, streams
from giornata.bus.connection import RefusedError
from giornata.wire.subjects import NatsRole
from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.faults import wait_whole
from giornata_tools.launcher import stack as launcher
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import NATS, VALKEY, NatsServer, StackPlan, nats_command
from giornata_tools.launcher.process import LaunchCommand, LaunchError, StackProcess
from giornata_tools.launcher.warden import OrphanReaper, signal_group
from tests import forked_programs
from tests.e2e.live import kill_server
from tests.patience import HUNG_S

ROOT = Path(__file__).parents[3]
LIGHT = {ServiceName.LORA_STORE: 2}
ONE = {ServiceName.LORA_STORE: 1}
running = partial(launcher.running, spawn=forked_programs.spawn)


def plan(tmp_path: Path, **changes: object) -> StackPlan:
    fields: dict[str, object] = {
        "state": tmp_path / "state",
        "logs": tmp_path / "logs",
        "models": (StackModel("unused"),),
        "replicas": LIGHT,
        "ready_s": HUNG_S,
    }
    return StackPlan(**(fields | changes))  # type: ignore[arg-type]  # a test's own shorthand


def children() -> list[psutil.Process]:
    return [
        child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE
    ]


async def test_it_is_ready_when_telemetry_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    """With one true start of a service, by its own program."""
    before = {child.pid for child in children()}
    async with launcher.running(plan(tmp_path, replicas=ONE)) as stack:
        await stack.bring_up()
        assert len(stack.watch.fleet.ready(ServiceName.LORA_STORE)) == 1
        async with (
            bus.connect(stack.nats_url, "test") as connected,
            RedisBlobs.open(stack.blobs_url) as blobs,
        ):
            assert connected.client.max_payload == 8 << 20
            with pytest.raises(RefusedError):  # who brings no password is an application
                await connected.jetstream.account_info()
            await blobs.put("key", b"kept", 60)
        passwords = [path.read_text().strip() for path in map(stack.nats_password_file, NatsRole) if path]
        started = [child for child in children() if child.pid not in before]
        told = [text for child in started for text in (*child.cmdline(), *child.environ().values())]
        told += [path.read_text() for path in stack.plan.logs.glob("*.log")]
        assert len(passwords) == len(NatsRole)
        assert not any(password in text for password in passwords for text in told)
    assert stack.obituaries == [], "everything ended with status 0"
    assert {child.pid for child in children()} <= before


async def test_a_frozen_process_is_missed_until_it_goes_on_and_others_are_ended_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "SILENCE_S", 1.0)  # a third, in this process alone
    async with running(plan(tmp_path)) as stack:
        await stack.bring_up()
        one, other = stack.instances(ServiceName.LORA_STORE)
        signal_group(stack.process(other).pid, signal.SIGSTOP)
        await stack.watch.until(lambda fleet: fleet.get(other) is None, HUNG_S, lambda _: "it is heard")
        signal_group(stack.process(other).pid, signal.SIGCONT)
        await wait_whole(stack, len(stack.servers), HUNG_S)
        assert stack.watch.fleet.get(other) is not None

        await stack.kill(one)
        assert stack.instances(ServiceName.LORA_STORE) == [other]
        assert await stack.terminate(other) == 0
        assert stack.instances(ServiceName.LORA_STORE) == []
        (third,) = await stack.start(ServiceName.LORA_STORE)
        await stack.wait_ready(HUNG_S)
        assert [state.instance for state in stack.watch.fleet.ready(ServiceName.LORA_STORE)] == [third]
    assert stack.obituaries == [], "everything else ended with status 0"


async def test_a_folder_has_one_stack_at_a_time_and_the_next_finds_its_blobs(tmp_path: Path) -> None:
    async with running(plan(tmp_path, replicas={})) as stack, RedisBlobs.open(stack.blobs_url) as blobs:
        ref = await blobs.put("key", b"kept", 60)
        with pytest.raises(LaunchError, match="Another stack"):
            async with running(plan(tmp_path, replicas={})):
                pass
    async with running(plan(tmp_path, replicas={})) as stack, RedisBlobs.open(stack.blobs_url) as blobs:
        assert await blobs.get(ref) == b"kept"


async def test_an_early_end_is_told_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as raised:
        async with running(plan(tmp_path, replicas=ONE, env={"GIORNATA_TELEMETRY_HZ": "fast"})) as stack:
            await stack.bring_up()
    assert "ended with status 2" in str(raised.value)
    assert "GIORNATA_TELEMETRY_HZ" in str(raised.value)


async def test_what_is_missing_is_named(tmp_path: Path) -> None:
    async with running(plan(tmp_path, ready_s=0.01)) as stack:
        with pytest.raises(
            LaunchError, match=r"^After 0\.01 s: not ready: lora-store-\S+, lora-store-\S+\.$"
        ):
            await stack.bring_up()


async def test_crashed_services_and_servers_come_back_and_it_is_whole_again(tmp_path: Path) -> None:
    told: list[str] = []
    async with running(plan(tmp_path), told.append) as stack:
        await stack.bring_up()
        stack.keep_up = True
        nats_url, before = stack.nats_url, len(stack.servers)
        one, other = stack.instances(ServiceName.LORA_STORE)
        assert await stack.process(one).crash() == -signal.SIGKILL
        assert await stack.process(NATS).crash(signal.SIGTERM) == 0
        with pytest.raises(LaunchError, match="not whole"):
            await wait_whole(stack, before, 0.01)
        await wait_whole(stack, before, HUNG_S)
        assert set(stack.servers) == {NATS, VALKEY}
        assert stack.nats_url == nats_url
        kept, successor = stack.instances(ServiceName.LORA_STORE)
        assert kept == other != successor
        assert stack.watch.fleet.get(kept) is not None
        assert stack.watch.fleet.get(successor) is not None
    assert sum("started again in 0.5 s" in sentence for sentence in told) == 2
    assert stack.obituaries == []


async def test_three_nats_servers_are_one_and_each_comes_back(tmp_path: Path) -> None:
    async with running(plan(tmp_path, replicas=ONE, nats_servers=3)) as stack:
        names = [f"{NATS}-{i}" for i in (1, 2, 3)]
        assert set(names) <= set(stack.servers)
        assert len(stack.nats_url.split(",")) == 3
        await stack.bring_up()
        router = stack.nats_password_file(NatsRole.ROUTER)
        connecting = bus.connect(stack.nats_url, "test", user=NatsRole.ROUTER, password_file=router)
        async with connecting as connected:
            await streams.ensure(connected.jetstream, replicas=3, events_ttl_s=60)
            stack.keep_up = True
            for name, url in zip(names, stack.nats_url.split(","), strict=True):
                await kill_server(stack, name)
                async with bus.connect(url, "again"):
                    pass
            await streams.ensure(connected.jetstream, replicas=3, events_ttl_s=60)
    assert stack.obituaries == []


async def test_external_servers_are_used_and_left_alone(
    tmp_path: Path, nats_url: str, redis_url: str
) -> None:
    before = {child.pid for child in children()}
    async with running(plan(tmp_path, replicas=ONE, nats_url=nats_url, blobs_url=redis_url)) as stack:
        await stack.bring_up()
        assert (stack.nats_url, stack.blobs_url) == (nats_url, redis_url)
        assert {child.name() for child in children() if child.pid not in before}.isdisjoint({NATS, VALKEY})
    async with bus.connect(nats_url, "still there"), RedisBlobs.open(redis_url):
        pass


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A temporary folder with a short path for unix sockets; a killed launcher cannot remove its own."""
    folder = Path(tempfile.mkdtemp(prefix="gio-"))
    yield folder
    shutil.rmtree(folder)


PROGRAM = """
import asyncio, sys
from pathlib import Path
from giornata_tools.launcher import up as program
from giornata_tools.launcher.models import StackModel
from giornata_tools.launcher.plan import StackPlan
from giornata_tools.launcher.stack import running
from giornata.wire.workers import ServiceName

async def main():
    folder = Path(sys.argv[1])
    replicas = {ServiceName.LORA_STORE: 1}
    models = (StackModel("unused"),)
    plan = StackPlan(state=folder, logs=folder / "logs", models=models, replicas=replicas)
    async with running(plan) as stack:
        await stack.bring_up()
        print("up", flush=True)
        await asyncio.Event().wait()

sys.exit(program.run("test", main))
"""


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGTERM]])
async def test_nothing_outlives_the_launcher(
    tmp_path: Path, sockets: Path, signals: list[signal.Signals]
) -> None:
    launcher = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, str(tmp_path)),
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(sockets)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    assert launcher.stdout
    async with asyncio.timeout(HUNG_S):
        assert await launcher.stdout.readline()
        family = psutil.Process(launcher.pid).children(recursive=True)
        assert len(family) >= 4, "the warden, two servers, a service"
        for number in signals:
            launcher.send_signal(number)
        status = await launcher.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, HUNG_S)
    assert alive == []
    assert status == (-signal.SIGKILL if signals == [signal.SIGKILL] else 130)
    if status == 130:
        logs = "".join(path.read_text() for path in (tmp_path / "logs").glob("lora-store-*.log"))
        assert "drained" in logs


# Logs on a full disk: the launcher goes on, and so does what it runs.


TALKS = "import sys; print('up', flush=True); sys.stdin.read(); [print('x' * 4096, flush=True) for _ in range(64)]"


@pytest.mark.parametrize("announcement", [re.compile("up"), None], ids=["copied", "its own"])
async def test_a_log_that_cannot_be_written_ends_neither_the_process_nor_who_keeps_it(
    tmp_path: Path, announcement: re.Pattern[str] | None
) -> None:
    (tmp_path / "talks.log").symlink_to("/dev/full")
    body = TALKS if announcement else f"import sys; sys.stdout = sys.stderr = open('/dev/null', 'w'); {TALKS}"
    command = LaunchCommand("talks", (sys.executable, "-c", body), dict(os.environ), announcement)
    with OrphanReaper() as warden:
        process = await StackProcess.start(command, tmp_path, warden)
        await asyncio.wait_for(process.attend(), HUNG_S)
        if announcement:
            assert (await process.announced(HUNG_S)).group() == "up"
    assert process.status == 0


async def test_a_log_that_cannot_be_made_ends_nothing(tmp_path: Path) -> None:
    command = LaunchCommand("talks", (sys.executable, "-c", TALKS), dict(os.environ), re.compile("up"))
    with OrphanReaper() as warden:
        process = await StackProcess.start(command, tmp_path / "missing", warden)
        await asyncio.wait_for(process.attend(), HUNG_S)
        assert (await process.announced(HUNG_S)).group() == "up"
        assert process.obituary().endswith("(empty)")
    assert process.status == 0


def test_a_server_that_is_started_again_needs_no_room_for_its_configuration(tmp_path: Path) -> None:
    server = NatsServer("nats-server", tmp_path / "nats", tmp_path / "users", port=4222)
    first = nats_command(server, {})
    (tmp_path / "nats" / "nats.conf").chmod(0o400)
    before = (tmp_path / "nats" / "nats.conf").stat().st_mtime_ns
    assert nats_command(server, {}) == first
    assert (tmp_path / "nats" / "nats.conf").stat().st_mtime_ns == before
