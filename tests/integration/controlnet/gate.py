"""ControlNets whose forwards a test holds, and makes fail."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from giornata.control.networks import ControlNet, ControlSequenceStep
from giornata_controlnet.resident_nets import ResidentControlNets
from tests.patience import HUNG_S


class Held:
    """A ControlNet that notes how many sequences share a forward, and computes with a permit for each."""

    def __init__(self, of: ControlNet, gate: Gate) -> None:
        self.net, self.card, self.device, self.dtype = of.net, of.card, of.device, of.dtype
        self.behind, self.open, self.work = of.behind, of.open, of.work
        self._of, self._gate = of, gate

    def run(self, items: Sequence[ControlSequenceStep]) -> Iterator[tuple[Tensor, ...]]:
        self._gate.forwards.append((self.card.name, len(items)))
        self._gate.began.release()
        assert self._gate.permits.acquire(timeout=HUNG_S)
        if self._gate.error is not None:
            raise self._gate.error
        if len(items) > self._gate.most:
            raise torch.OutOfMemoryError("no room")
        if any(torch.isnan(item.latents).any() for item in items):
            raise ValueError("a latent that the net cannot take")
        for sample in self._of.run(items):
            yield sample
            if self._gate.each is not None:
                assert self._gate.each.acquire(timeout=HUNG_S)


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


class HeldNets(ResidentControlNets):
    """Nets whose forwards a test holds."""

    def __init__(self, *args: Any, gate: Gate, **options: Any) -> None:
        super().__init__(*args, **options)
        self._gate = gate
        self._held: dict[int, Held] = {}

    async def loaded(self, digest: str) -> ControlNet:
        found = await super().loaded(digest)
        return self._held.setdefault(id(found), Held(found, self._gate))
