"""What the suite of data paths asks for, and how."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from giornata.control.link import ControlFailed, LinkLate, LinkLost
from giornata.control.link.client import ControlLink, ControlStepHandle
from giornata.wire.controlnets import DataPath
from tests.fakes.control_instance import TOKENS, Instance
from tests.patience import HUNG_S

SHAPES: Final = ((12, 40), (5, 24), (1, 7))
"""(tokens, channels) of a step's samples."""
STEP_BYTES: Final = sum(-(-tokens * channels * 4 // 64) * 64 for tokens, channels in ((4, 8), *SHAPES))
"""What such a step takes in float32, with latents (4, 8): places are multiples of 64 bytes."""
SLAB_BYTES: Final = 1 << 20
SOON_S: Final = 0.01


def device_of(path: DataPath) -> torch.device:
    return torch.device("cuda:0" if path is DataPath.CUDA else "cpu")


def opened(
    path: DataPath,
    to: Instance,
    token: str = TOKENS[0],
    *,
    slab_bytes: int = SLAB_BYTES,
    room_s: float = HUNG_S,
) -> ControlLink:
    device = device_of(path)
    return ControlLink(path, to.addresses[path], token, slab_bytes=slab_bytes, device=device, room_s=room_s)


def ask(
    link: ControlLink, latents: Tensor, dtype: torch.dtype = torch.float32, row: str = "j/1/0"
) -> ControlStepHandle:
    tokens, channels = zip(*SHAPES, strict=True)
    return link.ask(
        row=row,
        step=3,
        level=0.625,
        latents=latents,
        tokens=tokens,
        channels=channels,
        dtype=dtype,
        whole=False,
    )


def samples(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def took(asked: ControlStepHandle, index: int) -> Tensor:
    return asked.sample(index, HUNG_S).cpu()


def open_files() -> int:
    """How many this process has, without those that only wait to be collected."""
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    """A thread that waits, and what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (LinkLost, LinkLate, ControlFailed, ValueError) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised
