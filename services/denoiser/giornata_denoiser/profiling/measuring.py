"""Measuring steps and loads: warmed up, repeated, in an order in which drift does not follow size."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from giornata.wire.values import Mode
from giornata_denoiser.blocks.slabs import Slabs
from giornata_denoiser.engine.assembly import assemble
from giornata_denoiser.engine.stepping import denoise_step
from giornata_denoiser.profiling.memory import peak_bytes
from giornata_denoiser.profiling.mixtures import Mixture, RowSize, SlabSize
from giornata_denoiser.profiling.rows import Workpieces

Clock = Callable[[], float]
"""Monotonic seconds."""
T = TypeVar("T")


class StepTime(NamedTuple):
    """What a step took."""

    mixture: Mixture
    ms: float


class LoadTime(NamedTuple):
    """What loading one slab took."""

    size_bytes: int
    """That had to move for it."""
    ms: float


def medians(
    things: Sequence[T], measure: Callable[[T], float], *, rounds: int, seed: int, told: Callable[[], object]
) -> list[float]:
    """The median time of every thing, in ms; each round takes all of them in an order of its own.

    Args:
        things: to be measured.
        measure: one of them once, in ms.
        rounds: how often.
        seed: of the orders.
        told: called after every measurement.
    """
    chance = random.Random(seed)  # noqa: S311 - an order, not a secret
    times: list[list[float]] = [[] for _ in things]
    for _ in range(rounds):
        for index in chance.sample(range(len(things)), len(things)):
            times[index].append(measure(things[index]))
            told()
    return [statistics.median(of_one) for of_one in times]


class Meter:
    """Measures one thing at a time.

    Args:
        workpieces: to measure with.
        clock: monotonic seconds; on a GPU its own events tell a step's time.
    """

    def __init__(self, workpieces: Workpieces, clock: Clock) -> None:
        self._workpieces, self._clock = workpieces, clock
        self._family = workpieces.checkpoint.family

    def step_ms(self, mixture: Mixture) -> float:
        """One step of `mixture`, after another one that is not measured. Slabs are loaded before."""
        step = self._prepared(mixture)
        with torch.inference_mode():
            step()
            return self._timed(step)

    def step_bytes(self, mixture: Mixture) -> int:
        """Peak memory of a step, beyond what is kept from step to step."""
        step = self._prepared(mixture)
        with torch.inference_mode():
            step()
            return peak_bytes(self._family.device, step)

    def load_ms(self, size: SlabSize) -> float:
        """The median of the blocks' slabs, each until it has arrived; what goes wrong with a load is raised."""
        slabs = self._slabs(size)
        with torch.inference_mode():
            times = [self._timed_load(slabs, block, size) for block in range(self._family.blocks)]
        return statistics.median(times)

    def load_bytes(self, size: SlabSize) -> int:
        """What has to move for one block's slab."""
        return self._slabs(size).load_bytes(0, size.mode)

    def _prepared(self, mixture: Mixture) -> Callable[[], object]:
        rows = tuple(self._workpieces.row(size, index) for index, size in enumerate(mixture.rows))
        uses = self._workpieces.uses(mixture.rows, rows)
        with torch.inference_mode():
            assembly = assemble(self._family, rows)
        return lambda: denoise_step(self._family, assembly, rows, uses)

    def _timed_load(self, slabs: Slabs, block: int, size: SlabSize) -> float:
        # Who asks for a slab loads it, and lets the current stream wait for it: its events then tell when it is there.
        ask = slabs.keys_values if size.mode is Mode.KV else slabs.hidden
        return self._timed(lambda: ask(block))

    def _slabs(self, size: SlabSize) -> Slabs:
        row = RowSize(size.height, size.width, size.text, (size.mode,) * self._family.blocks, size.ratio)
        where = self._workpieces.region(row)
        if where is None:
            raise ValueError(f"received {size}, of which nothing is loaded")
        entry = self._workpieces.entry(size.height, size.width, size.text)
        return self._workpieces.slabs(entry, where, row.tokens)

    def _timed(self, compute: Callable[[], object]) -> float:
        device = self._family.device
        if device.type != "cuda":
            began = self._clock()
            compute()
            return (self._clock() - began) * 1e3
        event: Any = torch.cuda.Event  # without types
        began_event, ended_event = event(enable_timing=True), event(enable_timing=True)
        torch.cuda.synchronize(device)
        began_event.record()
        compute()
        ended_event.record()
        torch.cuda.synchronize(device)
        return float(began_event.elapsed_time(ended_event))
