"""Processes that belong to groups and run what a test sends them, and batches that are equal in each."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.packed.packing import BlockInputs
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import GroupLost, RankGroup, RankGroups, shared
from giornata_denoiser.rows.row import Row
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


# Steps of batches, by one process and by groups: equal specs make equal batches in every process.


TOLERANCE = 1e-5
"""Tolerance of float32: sums of attention and projections are grouped otherwise."""

Latents = list[NDArray[np.float32]]
Made = tuple[ModelFamily, list[Row], Callable[[ModelFamily], Sequence[BlockInputs]]]
"""A family, rows, and what their sequences use in a forward of that family or of a share of it."""
Making = Callable[[], Made]
Together = Callable[[ModelFamily, RankGroup], ModelFamily]
"""How a group computes a batch."""


def alone(made: Making, steps: int) -> list[Latents]:
    """The rows' latents before the first of `steps`, and after each, by one process."""
    of, rows, uses = made()
    after = [values(row.latent for row in rows)]
    with torch.inference_mode():
        for _ in range(steps):
            rows = advanced(of, rows, uses(of))
            after.append(values(row.latent for row in rows))
    return after


def step_of(
    member: Member,
    making: Making,
    devices: tuple[int, ...],
    latents: Latents,
    step: int,
    epoch: int = 0,
    together: Together = shared,
) -> Latents:
    """The rows' latents after a step that a group computes."""
    name = repr(making)  # two of equal parts are equal in nothing else
    if name not in member.kept:
        member.kept[name] = making()
    of, rows, uses = member.kept[name]
    at = [
        replace(row, latent=torch.from_numpy(latent), step=step)
        for row, latent in zip(rows, latents, strict=True)
    ]
    part = together(of, member.group(devices, epoch))
    return values(row.latent for row in advanced(part, at, uses(part)))


def advanced(of: ModelFamily, rows: Sequence[Row], uses: Sequence[BlockInputs]) -> list[Row]:
    """The rows after one more step."""
    latents = [each.latent for each in denoise_step(of, assemble(of, rows), rows, uses)]
    return [replace(row, latent=latent, step=row.step + 1) for row, latent in zip(rows, latents, strict=True)]


def walk(
    members: Members, making: Making, plan: Sequence[tuple[int, ...]], together: Together = shared
) -> list[Latents]:
    """Each step by other devices, the latents carried over; they are equal to one process's at every step."""
    wanted = alone(making, len(plan))
    walked = [wanted[0]]
    for step, devices in enumerate(plan):
        answers = members.run(devices, step_of, making, devices, walked[-1], step, members.epoch, together)
        for answer in answers:
            assert_close(answer, wanted[step + 1])
        walked.append(answers[0])
    return walked


def assert_close(latents: Latents, wanted: Latents) -> None:
    for latent, other in zip(latents, wanted, strict=True):
        np.testing.assert_allclose(latent, other, rtol=0, atol=TOLERANCE)


def values(latents: Iterable[Tensor]) -> Latents:
    return [latent.numpy() for latent in latents]
