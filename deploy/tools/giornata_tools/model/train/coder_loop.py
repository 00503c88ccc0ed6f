"""The loop of the stages that train coders: seeded steps of two optimisers, told and saved on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

TELL_EVERY: Final = 50
GREATEST_GRADIENT: Final = 1.0

Losses = dict[str, torch.Tensor]
"""Scalars by name; `loss` is what is minimised."""


@dataclass(frozen=True)
class CoderLoop:
    """A stage's steps, from wherever it stopped."""

    title: str
    seed: int
    steps: int
    """Steps in total."""
    coder: nn.Module
    """What is trained."""
    optimisers: tuple[torch.optim.Optimizer, torch.optim.Optimizer]
    peak_rates: tuple[float, float]
    """Learning rates of Muon and of AdamW."""
    rate_factor: Callable[[int], float]
    """Factor of the learning rates, by step."""
    save_every: int
    save: Callable[[int], None]
    """Called with the number of steps taken."""

    def run(self, first: int, loss_of: Callable[[int], Losses]) -> None:
        """Take the steps from `first`; `loss_of` finds torch's generator seeded for its step."""
        began = time.perf_counter()
        for step in range(first, self.steps):
            torch.manual_seed(int(np.random.default_rng((self.seed, step)).integers(2**31)))
            losses = loss_of(step)
            self._update(step, losses["loss"])
            if step % TELL_EVERY == TELL_EVERY - 1:
                rate = (step + 1 - first) / (time.perf_counter() - began)
                print(
                    f"{self.title} {step + 1}/{self.steps} {_told(losses.items())} {rate:.2f} steps/s",
                    flush=True,
                )
            if step % self.save_every == self.save_every - 1 or step + 1 == self.steps:
                self.save(step + 1)

    def _update(self, step: int, loss: torch.Tensor) -> None:
        self.coder.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.coder.parameters(), GREATEST_GRADIENT)
        for optimiser, peak in zip(self.optimisers, self.peak_rates, strict=True):
            optimiser.param_groups[0]["lr"] = peak * self.rate_factor(step)
            optimiser.step()


def _told(losses: Iterable[tuple[str, torch.Tensor]]) -> str:
    return " ".join(f"{name} {float(value.detach()):.4f}" for name, value in losses)
