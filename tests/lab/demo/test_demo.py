"""The demo at a gateway that hangs up, and its progress on terminals that can draw and that cannot."""

from __future__ import annotations

import asyncio
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from giornata_lab.demo.demo import DemoExhibits, DemoOptions, edited, told_to
from giornata_lab.demo.exhibits import exhibits
from giornata_tools.clients.edits import EditProgress
from giornata_tools.launcher.process import LaunchError


async def test_a_gateway_that_hangs_up_is_told_in_a_sentence(tmp_path: Path) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        options = DemoOptions(None, 1, tmp_path, steps=1, seed=0, no_oracle=True)
        with pytest.raises(LaunchError, match=rf"^The gateway at {url} stopped answering: .+\."):
            await edited(url, options, DemoExhibits(exhibits()[:1], ()), Console(file=StringIO()))


def test_a_dumb_terminal_gets_a_line_per_step() -> None:
    out = StringIO()
    with told_to(Console(file=out, force_terminal=False)) as tell:
        tell(EditProgress(job_id="j", state="preparing", attempt=1))
        for step in (1, 2):
            tell(EditProgress(job_id="j", state="running", attempt=1, step=step, steps=2))
    assert out.getvalue().splitlines() == ["  preparing", "  running: step 1 of 2", "  running: step 2 of 2"]
