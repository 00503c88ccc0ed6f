"""A process whose wall clock jumps when it is told to, and whose monotonic clock does not."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from giornata.wire.workers import ServiceName
from giornata_lab.rehearsals.chaos.faults import Clocks
from tests.patience import HUNG_S

PROGRAM = """
import datetime, sys, time
began = time.time() - time.monotonic()
for line in sys.stdin:
    while abs(time.time() - time.monotonic() - began - float(line)) > 60:
        time.sleep(0.05)
    print(round(datetime.datetime.now().timestamp() - time.monotonic() - began, -1), flush=True)
"""


async def test_the_clock_of_one_service_jumps_to_and_fro(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        env={**os.environ, **clocks.env(ServiceName.ROUTER)},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    async with asyncio.timeout(HUNG_S):
        for service, jump_s, ahead_s in (
            (ServiceName.GATEWAY, 500, 0),
            (ServiceName.ROUTER, 3000, 3000),
            (ServiceName.ROUTER, -4000, -1000),
        ):
            clocks.put_forward(service, jump_s)
            process.stdin.write(f"{ahead_s}\n".encode())
            assert float(await process.stdout.readline()) == ahead_s
        process.stdin.close()
        assert await process.wait() == 0
