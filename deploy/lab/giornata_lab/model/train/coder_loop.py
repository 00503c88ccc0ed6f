"""The loop of stages that need no pool of latents: seeded steps of two optimisers, told and saved on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from giornata_lab.model.train import stage
from giornata_lab.model.train.muon import Muon
from giornata_lab.model.train.stage import StagePlan, TrainingStateUnusable

TELL_EVERY: Final = 50
GREATEST_GRADIENT: Final = 1.0
MOST_SKIPPED: Final = 10
"""Steps in a row whose gradients are not finite."""

Losses = dict[str, torch.Tensor]
"""Scalars by name; `loss` is what is minimised."""


class CoderLoop:
    """A stage's steps, from wherever ``<title>.pt`` in the plan's folder stopped."""

    def __init__(
        self,
        title: str,
        plan: StagePlan,
        trained: nn.Module,
        optimisers: tuple[torch.optim.Optimizer, torch.optim.Optimizer],
        rates: tuple[float, float],
    ) -> None:
        """Take up the state on disk.

        Args:
            title: name of the stage, and of its state's file.
            plan: what is to be trained.
            trained: the module whose weights are learnt and saved.
            optimisers: Muon and AdamW, of its weights.
            rates: greatest learning rates of both.
        """
        self._title, self._plan, self._trained, self._rates = title, plan, trained, rates
        self._optimisers = optimisers
        self._path = plan.folder / f"{title}.pt"
        self._skipped = 0
        self.first = 0
        """Steps that were taken before."""
        if state := stage.load(self._path):
            trained.load_state_dict(state["weights"])
            for optimiser, saved in zip(self._optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.first = state["step"]

    def run(
        self, loss_of: Callable[[int], Losses], rate_factor: Callable[[int], float], save_every: int
    ) -> bool:
        """Take the steps that are left, or those until the plan's deadline; tell whether all are taken.

        Args:
            loss_of: the losses of a step; torch's generator is seeded for it.
            rate_factor: factor of the learning rates at a step.
            save_every: so many steps.

        Raises:
            Unusable: gradients of many steps in a row are not finite; of few they are left out.
        """
        began, steps = time.perf_counter(), self._plan.steps
        for step in range(self.first, steps):
            torch.manual_seed(int(np.random.default_rng((self._plan.seed, step)).integers(2**31)))
            losses = loss_of(step)
            self._update(losses["loss"], rate_factor(step))
            if step % TELL_EVERY == TELL_EVERY - 1:
                rate = (step + 1 - self.first) / (time.perf_counter() - began)
                told = " ".join(f"{name} {float(value.detach()):.4f}" for name, value in losses.items())
                print(f"{self._title} {step + 1}/{steps} {told} {rate:.2f} steps/s", flush=True)
            over = self._plan.over()
            if over or step % save_every == save_every - 1 or step + 1 == steps:
                states = [optimiser.state_dict() for optimiser in self._optimisers]
                weights = self._trained.state_dict()
                place = {"step": step + 1, "steps": steps, "seed": self._plan.seed}
                stage.save(self._path, {**place, "weights": weights, "optimisers": states})
            if over:
                return step + 1 == steps
        return True

    def _update(self, loss: torch.Tensor, rate_factor: float) -> None:
        self._trained.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._trained.parameters(), GREATEST_GRADIENT)
        if not norm.isfinite():  # a step less, where the weights would be lost
            self._skipped += 1
            if self._skipped > MOST_SKIPPED:
                raise TrainingStateUnusable(
                    f"{self._title}: the gradients of {self._skipped} steps in a row were not finite"
                )
            return
        self._skipped = 0
        for optimiser, peak in zip(self._optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = peak * rate_factor
            optimiser.step()


def coder_optimisers(
    coders: Sequence[Any], rates: tuple[float, float]
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the kernels between hidden layers, AdamW for the first and last ones, norms and biases.

    Args:
        coders: an encoder, a decoder or both.
        rates: greatest learning rates of Muon and of AdamW.
    """
    ends = {id(layer.weight) for coder in coders for layer in (coder.conv_in, coder.conv_out)}
    weights = [p for coder in coders for p in coder.parameters()]
    kernels = [p for p in weights if p.ndim == 4 and id(p) not in ends]
    others = [p for p in weights if p.ndim != 4 or id(p) in ends]
    return Muon(kernels, rates[0]), torch.optim.AdamW(others, rates[1], betas=(0.9, 0.99), weight_decay=0.0)
