"""Muon (Jordan et al., 2024): momentum whose update of each matrix is orthogonalised.

`torch.optim.Muon` orthogonalises in bfloat16, which takes longer than the training step itself on a CPU without
bfloat16 instructions; this one computes in float32 and takes equal shapes together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
ITERATIONS: Final = 5
RMS: Final = 0.2
"""Root mean square of an update at learning rate 1, that of AdamW (Liu et al., 2025, 2.2)."""


class Muon(torch.optim.Optimizer):
    """For matrices of hidden layers; kernels of convolutions count as (outputs, inputs * area). AdamW does the rest."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # no closure: nothing evaluates the loss again
        """One update from the gradients."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[tuple[nn.Parameter, torch.Tensor]]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append((parameter, parameter.grad))
            for parameters in by_shape.values():
                self._update(group, parameters)

    def _update(self, group: dict[str, Any], parameters: list[tuple[nn.Parameter, torch.Tensor]]) -> None:
        looks_ahead = []
        for parameter, gradient in parameters:
            state = self.state[parameter]
            velocity = state.setdefault("velocity", torch.zeros_like(parameter))
            velocity.lerp_(gradient, 1 - group["momentum"])
            looks_ahead.append(gradient.lerp(velocity, group["momentum"]))
        updates = orthogonalise(torch.stack(looks_ahead).flatten(2))
        scale = group["lr"] * RMS * max(updates.shape[1:]) ** 0.5
        for (parameter, _), update in zip(parameters, updates, strict=True):
            parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(
                update.view_as(parameter), alpha=-scale
            )


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """(count, rows, columns) → the same with singular values near 1, by Newton-Schulz iteration."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x: torch.Tensor = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x
