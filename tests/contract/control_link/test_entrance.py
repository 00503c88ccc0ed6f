"""Who is let in and who is not, what both sides may say, and the slabs of memory that they share."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from giornata import frames
from giornata.control.link import LinkLost, encode_frame, server, slabs
from giornata.control.link.client import ControlLink
from giornata.control.link.server import ControlStepRequest, Listener, is_known_token
from giornata.frames import LENGTH
from giornata.wire.controlnets import CancelStep, DataPath, LinkOpened, OpenLink, ResidualReady
from tests.contract.control_link.strangers import (
    ASK,
    CPU,
    FUZZED,
    LATENTS_BYTES,
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

# Who connects to an instance and is not a denoiser that may.


ENTRANCES = {
    "silence": b"",
    "half a length": b"\x05\x00",
    "no length": LENGTH.pack(0),
    "a long message": LENGTH.pack(1 << 30) + b"x" * 4096,
    "half a message": LENGTH.pack(100) + b"x" * 50,
    "no msgpack": LENGTH.pack(3) + b"\xc1\xc1\xc1",
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a step": encode_frame(ASK),
    "another schema": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), schema=99),
    "no file": encode_frame(OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=64)),
    "device memory": encode_frame(OpenLink(token=TOKEN, path=DataPath.CUDA, slab_bytes=64)),
    "no memory": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), slab_bytes=0),
    "too much memory": changed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64), slab_bytes=1 << 60),
    "a wrong token": encode_frame(OpenLink(token=TOKEN[:-1], path=DataPath.TCP, slab_bytes=64)),
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
    opening = encode_frame(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64))

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
        opening = encode_frame(OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=64))
        socket.send_fds(stranger, [opening], [writes] * 3)
        os.close(writes)
        assert to_the_end(stranger) == b""
    assert select.select([reads], [], [], HUNG_S)[0], "somebody has the file open"
    assert os.read(reads, 1) == b""
    os.close(reads)


def test_who_says_nothing_is_shown_out_in_time(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "OPENING_S", 0.05)
    with capture_logs() as logs, in_process.connect(DataPath.TCP) as stranger:
        stranger.sendall(b"\x10")
        assert to_the_end(stranger) == b""
    assert [each["reason"] for each in logs] == ["the first message did not come in time"]


def test_there_are_only_so_many_connections(in_process: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_LINKS", 2)
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


# A denoiser whose instance says what it must not.


class Impostor:
    """Listens as an instance does, admits everybody, and says what a test wants."""

    def __init__(self, said: bytes) -> None:
        self._said = said
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._thread.join(HUNG_S)
        self._listening.close()

    def _run(self) -> None:
        connected, _ = self._listening.accept()
        with connected:
            connected.settimeout(HUNG_S)
            (length,) = LENGTH.unpack(connected.recv(LENGTH.size, socket.MSG_WAITALL))
            connected.recv(length, socket.MSG_WAITALL)
            say(connected, self._said)
            to_the_end(connected)


@given(st.binary(max_size=64))
@FUZZED
def test_an_instance_that_says_anything_is_lost(noise: bytes) -> None:
    ill = LENGTH.pack(len(noise) + 1) + noise + b"\xc1"
    for said in (ill, encode_frame(LinkOpened()) + ill):
        with (
            Impostor(said) as impostor,
            contextlib.suppress(LinkLost),
            ControlLink(DataPath.TCP, impostor.address, TOKEN, slab_bytes=SLAB_BYTES, device=CPU) as link,
        ):
            lost_in_time(link)


@pytest.mark.parametrize(
    "said",
    [
        encode_frame(ResidualReady(number=0, index=0)),
        encode_frame(ResidualReady(number=1 << 40, index=1 << 40)),
        encode_frame(LinkOpened()),
        encode_frame(ASK),
        LENGTH.pack(1 << 31),
    ],
)
def test_an_instance_that_tells_what_nobody_asked_for_is_lost(said: bytes) -> None:
    with (
        Impostor(encode_frame(LinkOpened()) + said) as impostor,
        ControlLink(DataPath.TCP, impostor.address, TOKEN, slab_bytes=SLAB_BYTES, device=CPU) as link,
    ):
        lost_in_time(link)


def lost_in_time(link: ControlLink) -> None:
    link._reader.join(HUNG_S)
    assert link.lost
    with pytest.raises(LinkLost):
        link.ask(
            row="r",
            step=0,
            level=0.0,
            latents=torch.zeros(1, 1),
            tokens=[1],
            channels=[1],
            dtype=torch.float32,
            whole=True,
        )


# What an admitted denoiser may say to an instance, and what the instance may answer.


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (changed(ASK, offsets=(0, 4096)), "outside of the slab"),
        (changed(ASK, offsets=(0, 512)), "overlap"),
        (changed(ASK, dtype="complex64"), "dtype"),
        (changed(ASK, kind="jump"), "jump"),
        (changed(ASK, kind=["ask"]), "ask"),
        (changed(CancelStep(number=0), number="x"), "number"),
        (encode_frame(ResidualReady(number=0, index=0)), "sample"),
        (encode_frame(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64)), "opened twice"),
        (LENGTH.pack(1 << 24), "bytes; accepted"),
    ],
)
@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
def test_a_message_that_makes_no_sense_ends_its_connection_alone(
    in_process: Served, path: DataPath, said: bytes, why: str
) -> None:
    with capture_logs() as logs, admitted(in_process, path) as stranger:
        say(stranger, said)
        assert to_the_end(stranger) == b""
        in_process.still_serves()
    refused = [each for each in logs if each["event"] == "control_link_refused"]
    assert [why in each["error"] for each in refused] == [True]
    assert refused[0]["log_level"] == "error"
    assert TOKEN not in str(logs)


def test_a_step_that_comes_twice_ends_the_connection(in_process: Served) -> None:
    with admitted(in_process, DataPath.UNIX) as stranger:
        say(stranger, encode_frame(ASK) + encode_frame(ASK))
        assert to_the_end(stranger) == b""
        assert in_process.asked.get(timeout=HUNG_S).gone


@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
def test_any_bytes_behind_the_first_message(in_process: Served, path: DataPath) -> None:
    latents = bytes(LATENTS_BYTES) if path is DataPath.TCP else b""
    well_formed = encode_frame(ASK) + latents + encode_frame(CancelStep(number=0))

    @FUZZED
    @given(st.integers(0, len(well_formed)), st.binary(max_size=64))
    def disturb(cut: int, noise: bytes) -> None:
        with admitted(in_process, path) as stranger:
            say(stranger, well_formed[:cut] + noise + well_formed[cut:])
            with contextlib.suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
            to_the_end(stranger)

    with capture_logs():
        disturb()
        in_process.still_serves()


def test_a_denoiser_that_takes_nothing_in_does_not_hold_up_the_instance(
    in_process: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "STALLED_S", 1)
    with capture_logs() as logs, in_process.connect(DataPath.TCP) as stranger:
        size = 1 << 28
        stranger.sendall(encode_frame(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=2 * size)))
        ask = ASK.model_copy(update={"tokens": (4, 1 << 14), "channels": (64, size >> 16)})
        stranger.sendall(encode_frame(ask) + bytes(LATENTS_BYTES))
        step = in_process.asked.get(timeout=HUNG_S)
        step.answer(0, torch.zeros(step.shapes[0]))
        assert step.gone
        in_process.still_serves()
    assert "control_link_broken" in str(logs)


def test_a_sample_is_answered_once_and_in_its_shape(in_process: Served) -> None:
    with admitted(in_process, DataPath.UNIX) as stranger:
        twice = ASK.model_copy(
            update={"offsets": (0, 1024, 2048), "tokens": (4, 2, 2), "channels": (64, 128, 8)}
        )
        stranger.sendall(encode_frame(twice))
        step = in_process.asked.get(timeout=HUNG_S)
        with pytest.raises(ValueError, match=r"sample 0 is \(2, 127\), not \(2, 128\)"):
            step.answer(0, torch.zeros(2, 127))
        step.answer(0, torch.zeros(2, 128))
        for index in (0, 2, -1):
            with pytest.raises(ValueError, match=f"sample {index} is answered or unknown; 2"):
                step.answer(index, torch.zeros(2, 128))
        assert not step.gone


def test_a_step_that_cannot_be_queued_ends_its_connection(tmp_path: Path) -> None:
    def full(step: ControlStepRequest) -> None:
        raise queue.Full

    admits = partial(is_known_token, tokens=[TOKEN])
    with (
        capture_logs() as logs,
        Listener(admits, full, unix=tmp_path / "s", tcp=None, device=CPU) as listener,
        admitted(Served(listener), DataPath.UNIX) as stranger,
    ):
        stranger.sendall(encode_frame(ASK))
        assert to_the_end(stranger) == b""
    assert [each["event"] for each in logs] == ["control_link_failed"]


# Memory of a denoiser that an instance maps.


@pytest.mark.parametrize("sealed", [True, False], ids=["a memory file", "a temporary file"])
def test_a_slab_is_memory_that_two_see(sealed: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(frames, "_SEALABLE", sealed)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    slab = slabs.make_slab(DataPath.UNIX, SLAB_BYTES, CPU)
    assert list(tmp_path.iterdir()) == [], "it has no name"
    other = slabs.open_slab(
        OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=SLAB_BYTES), slab.descriptor, CPU
    )
    assert other is not None
    slabs.tensor_at(other, 64, (2, 3), torch.bfloat16).fill_(1.5)
    assert slabs.tensor_at(slab.memory, 64, (2, 3), torch.bfloat16).tolist() == [[1.5] * 3] * 2
    slab.sent()


def _unsealed(size_bytes: int) -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC)
    os.truncate(descriptor, size_bytes)
    return descriptor


@pytest.mark.parametrize(
    ("descriptor", "slab_bytes", "why"),
    [
        (partial(_unsealed, SLAB_BYTES), SLAB_BYTES, "unsealed"),
        (
            lambda: slabs.make_slab(DataPath.UNIX, SLAB_BYTES, CPU).descriptor,
            2 * SLAB_BYTES,
            "8192 bytes.* of 4096",
        ),
        (lambda: os.open("/dev/null", os.O_RDONLY), SLAB_BYTES, "cannot be mapped"),
    ],
    ids=["it could shrink", "it is short", "it is no memory"],
)
def test_a_file_that_would_end_who_writes_to_it_is_refused(
    descriptor: Any, slab_bytes: int, why: str
) -> None:
    opening, found = OpenLink(token=TOKEN, path=DataPath.UNIX, slab_bytes=slab_bytes), descriptor()
    try:
        with pytest.raises(ValueError, match=why):
            slabs.open_slab(opening, found, CPU)
    finally:
        os.close(found)
