"""What every stage of training stands on: its plan, its ranks, its state on disk.

Data parallelism: ``torchrun --nproc-per-node N -m giornata_lab.model.train painter`` starts N processes that render
and differentiate their own rows and share gradients. On a CPU, N processes of one thread do more than one of N threads,
because most of a small model's operations are too short to share.

A state is written whole or not at all, and read without unpickling anything but tensors.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn


class TrainingStateUnusable(Exception):
    """A state on disk that the stage at hand cannot go on from, or build on."""


@dataclass(frozen=True)
class DataParallelRank:
    """Which of how many processes this is."""

    rank: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """The one that writes files and speaks."""
        return self.rank == 0

    def meet(self) -> None:
        """Wait until every process has come here: what the first one wrote is there for all."""
        if self.count > 1:
            distributed.barrier()

    def any(self, condition: bool, device: torch.device) -> bool:  # noqa: FBT001 - as the built-in of this name
        """Whether `condition` holds in one of the processes; all of them ask together, over tensors on `device`."""
        if self.count == 1:
            return condition
        counted = torch.tensor(float(condition), device=device)
        distributed.all_reduce(counted)
        return bool(counted)

    def share_gradients(self, module: nn.Module) -> None:
        """Replace every gradient by its mean over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        distributed.all_reduce(flat)
        flat /= self.count
        means = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, means, strict=True):
            gradient.copy_(mean.view_as(gradient))


@dataclass(frozen=True)
class StagePlan:
    """What is to be trained, and where."""

    folder: Path
    """State, sample grids and results."""
    steps: int
    """Steps in total, the ones before a restart included."""
    seed: int
    """Seed of weights, scenes and noise."""
    device: torch.device
    start: Path | None = None
    """A checkpoint whose weights are learnt on from, where `folder` holds no state; None for random ones."""
    ranks: DataParallelRank = field(default_factory=DataParallelRank)
    deadline: float = math.inf
    """When the stage is to stop with its state saved, in seconds of `time.monotonic`."""
    compiled: bool = False
    """Fuse the network's operations, one compilation a size: pays for itself within some hundred steps."""

    def over(self) -> bool:
        """Return whether the deadline has passed for this rank."""
        return time.monotonic() > self.deadline


@contextmanager
def joined(device: torch.device) -> Iterator[DataParallelRank]:
    """The ranks that torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        yield DataParallelRank()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield DataParallelRank(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings and containers of them); a kill at any moment leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load(path: Path) -> dict[str, Any] | None:
    """The state in `path`, or None where no run was begun."""
    if not path.exists():
        return None
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def digest(module: nn.Module) -> str:
    """12 hex digits of the sha-256 over a module's weights."""
    total = hashlib.sha256()
    for name, weights in sorted(module.state_dict().items()):
        total.update(name.encode() + b"\0" + weights.detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:12]
