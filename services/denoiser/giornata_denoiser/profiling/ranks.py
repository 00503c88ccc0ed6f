"""Processes that compute a profiler's steps with it: one for each device beyond the first, where it computes itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports no type

from giornata.gpus import VISIBLE, visible_alone
from giornata.planning.cost_model import HALVED, StepParallelism
from giornata.scheduling.degrees.pool import DEGREES
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import RankGroups, halve_guidance, shared, widest_group
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import StepShape

LOOPBACK: Final = "127.0.0.1"
GROUP_S: Final = 300.0
"""How long members wait for each other: the first one may load a model while others have it."""
JOIN_S: Final = 10.0
LOADED: Final = b"loaded"
"""What a process says first; then :data:`ENDED` after each step, or else what went wrong."""
ENDED: Final = b""


def ways_of(checkpoint: Checkpoint, devices: int) -> list[StepParallelism]:
    """Return how so many devices may compute a step of the model, one device aside."""
    family = checkpoint.family
    most = min(devices, widest_group(family))
    found = [StepParallelism(degree) for degree in DEGREES if 1 < degree <= most]
    if devices >= HALVED and checkpoint.card.takes_negative_prompt:
        found.append(StepParallelism(HALVED, halves=True))
    return sorted(found)


class GroupMeters:
    """The meters of one process's groups, a group for each way: the first devices of the pool, as many as it takes."""

    def __init__(self, meter: StepMeter, family: ModelFamily, groups: RankGroups) -> None:
        self._meter, self._family, self._groups = meter, family, groups
        self._known: dict[StepParallelism, StepMeter] = {}

    def of(self, way: StepParallelism) -> StepMeter:
        """The meter whose steps a group computes in this way; all members ask for it alike."""
        if way not in self._known:
            group = self._groups.of(tuple(range(way.degree)), 0)
            family = (halve_guidance if way.halves else shared)(self._family, group)
            self._known[way] = self._meter.computing(family)
        return self._known[way]


class ProfilerRanks:
    """The processes, and what they and this one measure together. Enter it in the process of the first device.

    Args:
        config: whose devices they have.
        checkpoint: the first device's.
        meter: its meter.
        visible: the GPUs that CUDA showed this process before it saw its own alone; None: all.

    Raises:
        Failed: on entering, a process cannot load the model.
    """

    def __init__(
        self, config: DenoiserConfig, checkpoint: Checkpoint, meter: StepMeter, visible: str | None = None
    ) -> None:
        self.ways: Final = tuple(ways_of(checkpoint, len(config.device_names)))
        self._config, self._visible = config, visible
        self._store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self._groups = RankGroups(self._store, 0, checkpoint.family.device, GROUP_S)
        self._meters = GroupMeters(meter, checkpoint.family, self._groups)
        self._pipes: list[Connection] = []

    def __enter__(self) -> Self:
        context, port = get_context("spawn"), self._store.port
        needed = max((way.degree for way in self.ways), default=1)
        self._processes = []
        for me, device in enumerate(self._config.device_names[1:needed], 1):
            here, there = context.Pipe()
            shown = None if device == "cpu" else visible_alone(device, self._visible)
            own = self._config.model_copy(
                update={"device": device if shown is None else "cuda:0", "devices": ""}
            )
            process = context.Process(target=serve, args=(own, me, port, there, shown), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        try:
            for pipe in self._pipes:
                self._hear(pipe, LOADED)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the groups, and wait for the processes' ends."""
        self._end()

    def _end(self) -> None:
        self._groups.close()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()

    def step_ms(self, way: StepParallelism, mixture: StepShape) -> float:
        """Milliseconds of a step of `mixture` in this way, as the first device sees it.

        Raises:
            Failed: another process could not compute it.
        """
        others: Sequence[Connection] = self._pipes[: way.degree - 1]
        for pipe in others:
            pipe.send((way, mixture))
        took_ms = self._meters.of(way).step_ms(mixture)
        for pipe in others:
            self._hear(pipe, ENDED)
        return took_ms

    def _hear(self, pipe: Connection, expected: bytes) -> None:
        """Wait for an answer: bytes, since nothing that another process has made is unpickled here."""
        try:
            answer = pipe.recv_bytes()
        except EOFError:
            answer = b"it has ended"
        if answer != expected:
            raise Failed(f"A process of the profiler failed: {answer.decode(errors='replace')}.")


def serve(config: DenoiserConfig, me: int, port: int, pipe: Connection, visible: str | None = None) -> None:
    """Be the process of the device at place `me`, until the profiler closes the other end of `pipe`.

    `visible` is the GPU that CUDA shows it, before it is asked for one.
    """
    if visible is not None:
        os.environ[VISIBLE] = visible
    with suppress(EOFError, BrokenPipeError):
        try:
            checkpoint = open_checkpoint(config)
            store = TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=GROUP_S))
            groups = RankGroups(store, me, checkpoint.family.device, GROUP_S)
            meters = GroupMeters(StepMeter(checkpoint, config.template_bits), checkpoint.family, groups)
            pipe.send_bytes(LOADED)
            while True:
                way, mixture = pipe.recv()
                meters.of(way).step_ms(mixture)
                pipe.send_bytes(ENDED)
        except (EOFError, BrokenPipeError):
            raise
        except Exception as error:  # noqa: BLE001 - the process's edge: the profiler is told
            pipe.send_bytes(repr(error).encode())
