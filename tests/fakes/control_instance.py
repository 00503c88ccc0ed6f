"""A ControlNet instance's end of the data path in a process of its own, which does what a test tells it to."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from giornata.control.link.server import ControlStepRequest, Listener, is_known_token
from giornata.control.link.slabs import DTYPES, NAMES, tensor_bytes
from giornata.wire.controlnets import DataPath, Dtype
from tests.forked_processes import FORKS
from tests.patience import HUNG_S

TOKENS: Final = ("first-token", "second-token")
SPAWN: Final = multiprocessing.get_context("spawn")
FACTORS: Final = (1.0, -0.5, 0.25)
"""What the first number of a step's latents is multiplied with in its samples, by index, where all are answered."""

Packed = tuple[str, tuple[int, ...], bytes]


def context_of(device: str) -> Any:
    """How processes start that use this device: CUDA wants those that have not been forked."""
    return FORKS if device == "cpu" else SPAWN


def packed(tensor: Tensor) -> Packed:
    """A tensor's dtype, shape and bytes, for a pipe between processes."""
    host = tensor.cpu().contiguous()
    return NAMES[host.dtype], tuple(host.shape), bytes(tensor_bytes(host))


def unpacked(given: Packed) -> Tensor:
    """A tensor again."""
    name, shape, data = given
    return torch.frombuffer(bytearray(data), dtype=DTYPES[Dtype(name)]).view(shape)


@dataclass(frozen=True)
class RemoteStep:
    """A step that an instance was asked for."""

    number: int
    token: str
    row: str
    step: int
    level: float
    whole: bool
    shapes: tuple[tuple[int, int], ...]
    dtype: str
    packed_latents: Packed

    @property
    def latents(self) -> Tensor:
        """As the instance got them."""
        return unpacked(self.packed_latents)


class Instance:
    """The test's hold on the process."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self._process, self._pipe = process, pipe
        self.addresses: Mapping[DataPath, str] = self._answer()

    def next_step(self) -> RemoteStep:
        """The next step that is asked for."""
        return RemoteStep(*self.call("next_step"))

    def answer(self, step: RemoteStep, index: int, sample: Tensor) -> None:
        """Returns when it is written, or dropped."""
        self.call("answer", step.number, index, packed(sample))

    def call(self, name: str, *arguments: object) -> Any:
        """What a function of `Told` returns."""
        self._pipe.send((name, arguments))
        return self._answer()

    def begin(self, name: str, *arguments: object) -> None:
        """Have it do something without waiting for the end."""
        self._pipe.send((name, arguments))

    def finish(self) -> None:
        """Wait for the end of what :meth:`begin` began."""
        self._answer()

    def stop(self) -> None:
        """Leave the listener's context, and wait for the process to end."""
        if self._process.is_alive():
            self.call("stop")
            self._process.join(HUNG_S)

    def kill(self) -> None:
        """End the process as the kernel does, and wait until it has."""
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(HUNG_S)

    def _answer(self) -> Any:
        assert self._pipe.poll(HUNG_S), "the instance hangs"
        return self._pipe.recv()


@contextmanager
def instance(folder: Path, device: str = "cpu") -> Iterator[Instance]:
    """A listener at a Unix socket in `folder` and at a TCP port of this host, for :data:`TOKENS`."""
    context = context_of(device)
    mine, others = context.Pipe()
    process = context.Process(
        target=_run, args=(others, folder / "link.sock", device), name="control instance"
    )
    process.start()
    others.close()
    try:
        found = Instance(process, mine)
        yield found
        found.stop()
    finally:
        process.kill()
        process.join(HUNG_S)
        mine.close()


class Told:
    """What the process does when it is told to."""

    def __init__(
        self, listener: Listener, asked: queue.SimpleQueue[ControlStepRequest], device: torch.device
    ) -> None:
        self._listener, self._asked, self._device = listener, asked, device
        self._steps: list[ControlStepRequest] = []

    def next_step(self) -> tuple[object, ...]:
        """The fields of a `RemoteStep`."""
        step = self._asked.get(timeout=HUNG_S)
        self._steps.append(step)
        known = (step.token, step.row, step.step, step.level, step.whole, step.shapes, NAMES[step.dtype])
        return (len(self._steps) - 1, *known, packed(step.latents))

    def answer(self, number: int, index: int, sample: Packed) -> None:
        """Write a sample."""
        self._steps[number].answer(index, unpacked(sample).to(self._device))

    def fail(self, number: int, code: str, message: str) -> None:
        """Refuse a step."""
        self._steps[number].fail(code, message)

    def gone(self, number: int) -> bool:
        """Whether nobody waits for a step."""
        return self._steps[number].gone

    def serve(self, count: int) -> None:
        """Answer all samples of so many steps; see :data:`FACTORS`."""
        for _ in range(count):
            step = self._asked.get(timeout=HUNG_S)
            for index, shape in enumerate(step.shapes):
                step.answer(index, torch.full(shape, float(step.latents[0, 0]) * FACTORS[index % 3]))

    def join(self) -> None:
        """Wait until no denoiser is connected."""
        for thread, _ in self._listener._serving:
            thread.join(HUNG_S)

    def forget(self) -> None:
        """Let go of all steps."""
        self._steps.clear()

    def mapped(self) -> int:
        """How often memory of denoisers is mapped."""
        return Path("/proc/self/maps").read_text(encoding="ascii").count("giornata-control")


def _run(pipe: Connection, unix: Path, device: str) -> None:
    asked: queue.SimpleQueue[ControlStepRequest] = queue.SimpleQueue()
    where = torch.device(device)
    admits = partial(is_known_token, tokens=TOKENS)
    with Listener(admits, asked.put, unix=unix, tcp=("127.0.0.1", 0), device=where) as listener:
        told = Told(listener, asked, where)
        pipe.send(dict(listener.addresses))
        name, arguments = pipe.recv()
        while name != "stop":
            pipe.send(getattr(told, name)(*arguments))
            name, arguments = pipe.recv()
    pipe.send(None)
