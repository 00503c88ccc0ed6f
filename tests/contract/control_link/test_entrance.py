"""Who connects to an instance and is not a denoiser that may."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from giornata.control.link import listener as listening
from giornata.control.link import serving
from giornata.control.link.client import ControlLink
from giornata.control.link.frames import LENGTH, framed
from giornata.wire.control_steps import OpenLink
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.strangers import (
    ASK,
    CPU,
    FUZZED,
    SLAB_BYTES,
    TOKEN,
    Served,
    admitted,
    changed,
    listening_at,
    say,
    to_the_end,
)
from tests.patience import HUNG_S

ENTRANCES = {
    "silence": b"",
    "half a length": b"\x05\x00",
    "no length": LENGTH.pack(0),
    "a long message": LENGTH.pack(1 << 30) + b"x" * 4096,
    "half a message": LENGTH.pack(100) + b"x" * 50,
    "no msgpack": LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a step": framed(ASK),
    "another schema": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), schema=99),
    "no file": framed(OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=64)),
    "device memory": framed(OpenLink(token=TOKEN, path=DataPath.CUDA, slab_bytes=64)),
    "no memory": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), slab_bytes=0),
    "too much memory": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), slab_bytes=1 << 60),
    "a wrong token": framed(OpenLink(token=TOKEN[:-1], path=DataPath.TCP, slab_bytes=64)),
}


@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
@pytest.mark.parametrize("said", ENTRANCES.values(), ids=ENTRANCES)
def test_who_does_not_open_the_path_is_shown_out(in_process: Served, path: DataPath, said: bytes) -> None:
    with capture_logs() as logs, in_process.connect(path) as stranger:
        say(stranger, said)
        with contextlib.suppress(OSError):  # shown out already
            stranger.shutdown(socket.SHUT_WR)
        assert to_the_end(stranger) == b""
        in_process.still_serves()
    told = [each for each in logs if each["event"].startswith("control_link")]
    assert told
    assert all("peer" in each for each in told)
    assert TOKEN not in str(logs)


@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
def test_any_bytes_at_the_start(in_process: Served, path: DataPath) -> None:
    opening = framed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64))

    @FUZZED
    @given(st.integers(0, len(opening)), st.binary(max_size=64), st.integers(0, len(opening)))
    def disturb(cut: int, noise: bytes, rest: int) -> None:
        with in_process.connect(path) as stranger:
            say(stranger, opening[:cut] + noise + opening[rest:])
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            to_the_end(stranger)

    with capture_logs():
        disturb()
        in_process.still_serves()


def test_files_that_nobody_asked_for_are_closed(in_process: Served) -> None:
    reads, writes = os.pipe()
    with capture_logs(), in_process.connect(DataPath.UNIX) as stranger:
        opening = framed(OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=64))
        socket.send_fds(stranger, [opening], [writes] * 3)
        os.close(writes)
        assert to_the_end(stranger) == b""
    assert select.select([reads], [], [], HUNG_S)[0], "somebody has the file open"
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_who_says_nothing_is_shown_out_in_time(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "OPENING_S", 0.05)
    with capture_logs() as logs, in_process.connect(DataPath.TCP) as stranger:
        stranger.sendall(b"\x10")
        assert to_the_end(stranger) == b""
    assert [each["reason"] for each in logs] == ["the first message did not come in time"]


def test_there_are_only_so_many_connections(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "MAX_LINKS", 2)
    with (
        capture_logs() as logs,
        admitted(in_process, DataPath.TCP),
        admitted(in_process, DataPath.TCP),
        in_process.connect(DataPath.TCP) as third,
    ):
        assert to_the_end(third) == b""
    assert "there are 2 connections" in str(logs)


def test_a_socket_that_a_killed_instance_left_is_replaced_and_goes_with_the_next(tmp_path: Path) -> None:
    left = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(left))
    with listening_at(left, None) as served:
        assert served.listener.addresses == {DataPath.UNIX: str(left)}
        assert left.stat().st_mode & 0o777 == 0o600
        served.still_serves()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="the host has no IPv6")
def test_an_address_of_ipv6() -> None:
    with listening_at(None, ("::1", 0)) as served:
        address = served.listener.addresses[DataPath.TCP]
        assert address.startswith("[::1]:")
        with ControlLink(DataPath.TCP, address, TOKEN, slab_bytes=SLAB_BYTES, device=CPU) as link:
            assert not link.lost


def test_what_cannot_be_listened_to_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"), listening_at(tmp_path / "s", ("127.0.0.1", port)):
            pass
    assert list(tmp_path.iterdir()) == []
