"""A denoiser whose instance says what it must not."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from giornata.control.link.client import ControlLink
from giornata.control.link.frames import LENGTH, framed
from giornata.control.link.losses import LinkLost
from giornata.wire.control_steps import LinkOpened, ResidualReady
from giornata.wire.controlnets import DataPath
from tests.contract.control_link.strangers import (
    ASK,
    CPU,
    FUZZED,
    SLAB_BYTES,
    TOKEN,
    say,
    to_the_end,
)
from tests.patience import HUNG_S


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
    for said in (ill, framed(LinkOpened()) + ill):
        with (
            Impostor(said) as impostor,
            contextlib.suppress(LinkLost),
            ControlLink(DataPath.TCP, impostor.address, TOKEN, slab_bytes=SLAB_BYTES, device=CPU) as link,
        ):
            lost_in_time(link)


@pytest.mark.parametrize(
    "said",
    [
        framed(ResidualReady(number=0, index=0)),
        framed(ResidualReady(number=1 << 40, index=1 << 40)),
        framed(LinkOpened()),
        framed(ASK),
        LENGTH.pack(1 << 31),
    ],
)
def test_an_instance_that_tells_what_nobody_asked_for_is_lost(said: bytes) -> None:
    with (
        Impostor(framed(LinkOpened()) + said) as impostor,
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
