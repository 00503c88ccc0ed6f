"""Processes that belong to groups, each of which runs what a test sends it."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata_denoiser.parallel import GroupLost, RankGroup, RankGroups
from tests.forked_processes import FORKS
from tests.patience import HUNG_S

SPAWN: Final = get_context("spawn")
CPU: Final = torch.device("cpu")


@dataclass
class Member:
    """What one process has."""

    me: int
    groups: RankGroups
    device: torch.device = CPU
    kept: dict[Any, Any] = field(default_factory=dict)
    """What earlier calls have left."""

    def group(self, devices: tuple[int, ...], epoch: int = 0) -> RankGroup:
        return self.groups.of(devices, epoch)


Job = Callable[..., Any]
"""Called with a :class:`Member` and what else is sent; a function of a module."""


class Members:
    """Processes with numbers, and the store by which they find each other.

    Each is on the CPU, or on the CUDA device of its number.
    """

    def __init__(self, count: int, *, cuda: bool = False) -> None:
        self._cuda = cuda
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, tuple[BaseProcess, Connection]] = {}
        self.epoch = 0
        """That of the groups that calls use."""
        for me in range(count):
            self.start(me)

    def start(self, me: int) -> None:
        here, there = SPAWN.Pipe()
        context = SPAWN if self._cuda else FORKS  # CUDA wants a process that has not been forked
        process = context.Process(target=_serve, args=(me, self.store.port, there, self._cuda), daemon=True)
        process.start()
        there.close()
        self._processes[me] = process, here

    def begin(self, devices: Sequence[int], job: Job, *args: object) -> None:
        for device in devices:
            self._processes[device][1].send((job, args))

    def end(self, devices: Sequence[int]) -> list[Any]:
        """What the calls of :meth:`begin` have answered, by device; an exception that one of them raised."""
        answers = []
        for device in devices:
            pipe = self._processes[device][1]
            assert pipe.poll(HUNG_S), f"device {device} hangs"
            answers.append(pipe.recv())
        return answers

    def run(self, devices: Sequence[int], job: Job, *args: object) -> list[Any]:
        """What `job` answers on each of the devices."""
        self.begin(devices, job, *args)
        answers = self.end(devices)
        errors = [answer for answer in answers if isinstance(answer, Exception | Lost)]
        if errors:
            self.epoch += 1  # other calls have other groups
        for error in errors:
            if isinstance(error, Exception):
                raise error
        assert not errors
        return answers

    def signal(self, device: int, number: signal.Signals) -> None:
        process, _ = self._processes[device]
        assert process.pid is not None
        os.kill(process.pid, number)
        if number is signal.SIGKILL:
            process.join(HUNG_S)

    def close(self) -> None:
        for process, pipe in self._processes.values():
            pipe.close()
            process.join(HUNG_S)


def _serve(me: int, port: int, pipe: Connection, cuda: bool) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", me) if cuda else CPU
    store = TCPStore("127.0.0.1", port, is_master=False)
    member = Member(me, RankGroups(store, me, device, HUNG_S), device)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            job, args = pipe.recv()
            try:
                with torch.inference_mode():
                    answer = job(member, *args)
            except GroupLost as lost:
                answer = Lost(lost.devices)
            except Exception as error:  # noqa: BLE001 - a process's edge: the test raises it
                answer = RuntimeError(f"device {me}: {''.join(traceback.format_exception(error))}")
                member.groups.close()  # so that no other member waits for it
            pipe.send(answer)
    member.groups.close()


@dataclass(frozen=True)
class Lost:
    """A group was lost."""

    devices: tuple[int, ...]
