"""What an admitted denoiser may say to an instance, and what the instance may answer."""

from __future__ import annotations

import contextlib
import queue
import socket
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from giornata.control.link import sockets
from giornata.control.link.asking import ControlStepRequest
from giornata.control.link.frames import LENGTH, framed
from giornata.control.link.listener import Listener, among
from giornata.wire.control_steps import CancelStep, OpenLink, ResidualReady
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.strangers import (
    ASK,
    CPU,
    FUZZED,
    LATENTS_BYTES,
    TOKEN,
    Served,
    admitted,
    changed,
    say,
    to_the_end,
)
from tests.patience import HUNG_S


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (changed(ASK, offsets=(0, 4096)), "outside of the slab"),
        (changed(ASK, offsets=(0, 512)), "overlap"),
        (changed(ASK, offsets=(0, -1024)), "offsets"),
        (changed(ASK, dtype="complex64"), "dtype"),
        (changed(ASK, tokens=(4, 1 << 40)), "tokens"),
        (changed(ASK, offsets=(0, 1000)), "multiple of 64"),
        (changed(ASK, kind="jump"), "jump"),
        (changed(ASK, kind=["ask"]), "ask"),
        (changed(CancelStep(number=0), number="x"), "number"),
        (framed(ResidualReady(number=0, index=0)), "sample"),
        (framed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=64)), "opened twice"),
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
        say(stranger, framed(ASK) + framed(ASK))
        assert to_the_end(stranger) == b""
        assert in_process.asked.get(timeout=HUNG_S).gone


@pytest.mark.parametrize("path", [DataPath.UNIX, DataPath.TCP])
def test_any_bytes_behind_the_first_message(in_process: Served, path: DataPath) -> None:
    latents = bytes(LATENTS_BYTES) if path is DataPath.TCP else b""
    well_formed = framed(ASK) + latents + framed(CancelStep(number=0))

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
    monkeypatch.setattr(sockets, "STALLED_S", 1)
    with capture_logs() as logs, in_process.connect(DataPath.TCP) as stranger:
        size = 1 << 28
        stranger.sendall(framed(OpenLink(token=TOKEN, path=DataPath.TCP, slab_bytes=2 * size)))
        ask = ASK.model_copy(update={"tokens": (4, 1 << 14), "channels": (64, size >> 16)})
        stranger.sendall(framed(ask) + bytes(LATENTS_BYTES))
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
        stranger.sendall(framed(twice))
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

    admits = partial(among, tokens=[TOKEN])
    with (
        capture_logs() as logs,
        Listener(admits, full, unix=tmp_path / "s", tcp=None, device=CPU) as listener,
        admitted(Served(listener), DataPath.UNIX) as stranger,
    ):
        stranger.sendall(framed(ASK))
        assert to_the_end(stranger) == b""
    assert [each["event"] for each in logs] == ["control_link_failed"]
