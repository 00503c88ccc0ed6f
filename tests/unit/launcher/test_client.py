"""The demo's reading of server-sent events, and its progress on terminals that can draw and that cannot."""

from __future__ import annotations

import asyncio
from io import StringIO

import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from rich.console import Console

from giornata_tools.launcher.client import ask, events, session
from giornata_tools.launcher.process import LaunchError
from giornata_tools.launcher.terminal import StepProgress

STREAM = (
    b": still working\n\n"
    b'event: image_edit.progress\ndata: {"step": 1, "text": "a: b"}\n\n'
    b'id: 3\nevent: image_edit.completed\ndata: {"b64_json": "\xc3\xa9"}\n\n'
)


@pytest.mark.parametrize("size", [1, 7, 4096])
async def test_events_are_read_however_the_bytes_arrive(size: int) -> None:
    loop = asyncio.get_running_loop()
    reader = StreamReader(BaseProtocol(loop), 2**16, loop=loop)
    for start in range(0, len(STREAM), size):
        reader.feed_data(STREAM[start : start + size])
    reader.feed_eof()
    assert [event async for event in events(reader)] == [
        ("image_edit.progress", {"step": 1, "text": "a: b"}),
        ("image_edit.completed", {"b64_json": "é"}),
    ]


async def test_a_gateway_that_hangs_up_is_told_in_a_sentence() -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(LaunchError, match=r"^The gateway stopped answering: .+\.$"):
            async with session(f"http://127.0.0.1:{port}") as opened:
                await ask(opened, b"i", b"m", {"prompt": "p"}, lambda *_: None)


def test_a_dumb_terminal_gets_a_line_per_step() -> None:
    out = StringIO()
    with StepProgress(Console(file=out, force_terminal=False)) as progress:
        progress("preparing", 0, 0)
        for step in (1, 2):
            progress("running", step, 2)
    assert out.getvalue().splitlines() == ["  preparing", "  running: step 1 of 2", "  running: step 2 of 2"]


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    out = StringIO()
    with StepProgress(Console(file=out, force_terminal=True, width=100)) as progress:
        progress("running", 2, 2)
    assert "2/2" in out.getvalue()
