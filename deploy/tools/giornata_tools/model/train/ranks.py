"""Data parallelism: processes that render and differentiate their own rows and share gradients.

``torchrun --nproc-per-node N -m giornata_tools.model.train painter`` starts N of them. On a CPU, N processes of one
thread do more than one of N threads, because most of a small model's operations are too short to share.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import distributed, nn


@dataclass(frozen=True)
class Ranks:
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


@contextmanager
def joined(device: torch.device) -> Iterator[Ranks]:
    """The ranks that torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        yield Ranks()
        return
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()
