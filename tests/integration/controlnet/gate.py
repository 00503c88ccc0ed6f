"""ControlNets whose forwards a test holds, and makes fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from giornata.control.networks import ControlNet, ControlSequenceStep
from giornata_controlnet.resident_nets import ResidentControlNets
from tests.patience import HUNG_S


@dataclass
class Gate:
    """Holds the forwards of a service's nets."""

    permits: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10_000))
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    forwards: list[tuple[str, int]] = field(default_factory=list)
    """Names of the nets, and sequences."""
    each: threading.Semaphore | None = None
    """Has a permit for each further sample of a forward."""
    most: int = 1000
    """Sequences that fit into memory."""
    error: Exception | None = None
    """What forwards raise."""

    def hold(self) -> None:
        """No forward goes on from now on."""
        while self.permits.acquire(blocking=False):
            pass

    def held(
        self, net: ControlNet
    ) -> Callable[[Sequence[ControlSequenceStep]], Iterator[tuple[Tensor, ...]]]:
        """What computes its samples, with a permit for each forward; notes how many sequences share one."""
        of = net.run

        def run(items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
            self.forwards.append((net.card.name, len(items)))
            self.began.release()
            assert self.permits.acquire(timeout=HUNG_S)
            if self.error is not None:
                raise self.error
            if len(items) > self.most:
                raise torch.OutOfMemoryError("no room")
            if any(torch.isnan(item.latents).any() for item in items):
                raise ValueError("a latent that the net cannot take")
            for sample in of(items):
                yield sample
                if self.each is not None:
                    assert self.each.acquire(timeout=HUNG_S)

        return run


class HeldNets(ResidentControlNets):
    """Nets whose forwards a test holds."""

    def __init__(self, *args: Any, gate: Gate, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gate = gate

    def _read(self, digest: str) -> ControlNet:
        net = super()._read(digest)
        net.run = self._gate.held(net)  # type: ignore[assignment,method-assign]  # of this one alone
        return net
