"""Logs on a full disk: the launcher goes on, and so does what it runs."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from giornata_tools.launcher.process import LaunchCommand, StackProcess
from giornata_tools.launcher.servers import NatsServer, nats_command
from giornata_tools.launcher.warden import OrphanReaper
from tests.patience import HUNG_S

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
