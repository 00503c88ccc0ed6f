"""A disk below the embedded servers that fills up and is freed: jobs are taken again, and none is lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import nats.errors
import pytest
from nats.js import JetStreamContext

from giornata.blobs import RedisBlobs
from giornata.bus import bus, streams
from giornata.wire import subjects
from giornata.wire.errors import GiornataError
from giornata.wire.subjects import JOBS, NatsRole
from giornata_tools.launcher import stack as launcher
from giornata_tools.launcher.plan import NATS, NATS_LISTENS, VALKEY, free_ports
from giornata_tools.launcher.process import LaunchCommand, StackProcess
from giornata_tools.launcher.stack import running
from giornata_tools.launcher.warden import OrphanReaper
from tests.full_disk import small_disk
from tests.integration.launcher.test_stack import ROOT, plan
from tests.patience import HUNG_S


async def stored(jetstream: JetStreamContext) -> bool:
    """Whether a message was kept; also not where this machine stands still for a second."""
    try:
        await jetstream.publish(subjects.jobs("batch"), bytes(4096), timeout=1)
    except nats.errors.Error:
        return False
    return True


async def written_for_ever(blobs: RedisBlobs) -> None:
    while True:
        await blobs.write("other", bytes(1 << 16), 600)


async def test_embedded_servers_take_writes_again_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "ROOM_S", 0.1)
    said: list[str] = []
    with small_disk(64) as disk:
        asked = plan(tmp_path, replicas={}, state=disk.folder / "state", logs=disk.folder / "logs")
        async with running(asked, said.append) as stack:
            stack.keep_up = True
            password = stack.nats_password_file(NatsRole.ROUTER)
            async with (
                bus.connect(
                    stack.nats_url, "test", user=NatsRole.ROUTER, password_file=password
                ) as connected,
                RedisBlobs.open(stack.blobs_url) as blobs,
                asyncio.timeout(HUNG_S),
            ):
                jetstream = connected.jetstream
                await streams.ensure_queue(jetstream, replicas=1, max_messages=1000, store_bytes=16 << 20)
                while not await stored(jetstream):
                    pass
                kept = await blobs.put("kept", b"kept", 600)
                server, valkey = stack.process(NATS), stack.process(VALKEY)
                disk.fill()
                while not server.stuck.done():
                    await stored(jetstream)
                assert server.stuck.result()
                with pytest.raises(GiornataError, match="disk"):
                    await written_for_ever(blobs)
                messages = (await jetstream.stream_info(JOBS)).state.messages
                disk.free()
                await server.ended.wait()
                while not await stored(jetstream):
                    pass
                assert (await jetstream.stream_info(JOBS)).state.messages > messages >= 1, "nothing is lost"
                while True:
                    try:
                        await blobs.write("other", bytes(1 << 16), 600)
                        break
                    except GiornataError:
                        await asyncio.sleep(0.1)  # the server finds out by itself
                assert await blobs.get(kept) == b"kept"
                assert stack.process(VALKEY) is valkey, "it needs no restart"
    assert any("is started again when there is room" in text for text in said)
    assert stack.obituaries == []


NC = """#!{python}
import socket, sys
with socket.create_connection((sys.argv[3], int(sys.argv[4])), timeout=60) as place:
    place.sendall(sys.stdin.buffer.read())
    while data := place.recv(65536):
        sys.stdout.buffer.write(data)
"""
"""What the image of NATS has of busybox."""


async def test_the_health_check_of_containers_ends_a_server_that_a_full_disk_has_stopped(
    tmp_path: Path,
) -> None:
    if shutil.which("wget") is None:
        pytest.skip("wget is missing here; the image of NATS has it")
    (tmp_path / "nc").write_text(NC.format(python=sys.executable))
    (tmp_path / "nc").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    monitor, clients = free_ports(2)
    with small_disk() as disk:
        config = tmp_path / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{clients}"\nhttp: "127.0.0.1:{monitor}"\n'
            f'jetstream {{ store_dir: "{disk.folder}", max_file_store: 1GB }}\n'
        )
        binary = Path(sys.executable).with_name("nats-server")
        command = LaunchCommand("nats", (str(binary), "--config", str(config)), env, NATS_LISTENS)
        with OrphanReaper() as warden:
            process = await StackProcess.start(command, tmp_path, warden)
            async with asyncio.TaskGroup() as tasks, asyncio.timeout(HUNG_S):
                tasks.create_task(process.attend())
                await process.announced(HUNG_S)

                async def healthy() -> bool:
                    told = ("127.0.0.1", str(monitor), str(disk.folder), str(process.pid))
                    script = await asyncio.create_subprocess_exec(
                        "sh", str(ROOT / "deploy" / "nats-health.sh"), *told, env=env
                    )
                    return await script.wait() == 0

                try:
                    async with bus.connect(f"nats://127.0.0.1:{clients}", "test") as connected:
                        await streams.ensure_queue(
                            connected.jetstream, replicas=1, max_messages=1000, store_bytes=16 << 20
                        )
                        while not await stored(connected.jetstream):
                            pass
                        assert await healthy()
                        disk.fill()
                        while await healthy():
                            await stored(connected.jetstream)
                        assert not process.ended.is_set(), "a new process would fare no better"
                        disk.free()
                        assert not await healthy()
                        await process.ended.wait()
                finally:
                    process.kill()
