"""A run of training on latents: two optimisers, an average of the weights, a state on disk that it goes on from."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from giornata_lab.model.train import stage
from giornata_lab.model.train.pool import SceneBatch, SceneEncoder, ScenePool, SceneSource, usual
from giornata_lab.model.train.stage import StagePlan

WARM_UP: Final = 100
COOL_DOWN: Final = 0.25
"""Last part of a run, in which the learning rates fall linearly to zero."""
MASKED_WEIGHT: Final = 8.0
"""Loss of a place that the mask touches; the others, which the condition shows, count 1."""
FRESH_PER_STEP: Final = 8
"""One in this many rows of a batch is rendered again."""
SAVE_EVERY_S: Final = 180.0
SHOW_EVERY: Final = 500
TELL_EVERY: Final = 50

Model = TypeVar("Model", bound=nn.Module)
Optimisers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
"""Muon for the matrices, AdamW for the rest."""


@dataclass(frozen=True)
class CurriculumStage:
    """Which sizes are trained on, until a part of the run."""

    until: float
    shares: dict[int, float]
    """Side in pixels → part of the steps."""


@dataclass(frozen=True)
class TrainingCurriculum:
    """What is trained on, and how fast."""

    title: str
    """Name of its state's file, and of what it tells."""
    stages: tuple[CurriculumStage, ...]
    rows: Mapping[int, int]
    """Rows of a batch by side in pixels."""
    rates: tuple[float, float]
    """Greatest learning rates of both optimisers."""
    average_decay: float = 0.998
    source: SceneSource = usual
    """What draws the scenes."""


class TrainingRun(Generic[Model]):
    """A course on its way.

    A restart goes on with the same weights, optimisers and schedule, and with scenes that no batch has shown yet; the
    pool of scenes that batches are drawn from begins again, so that the batches themselves are others.
    """

    def __init__(
        self,
        plan: StagePlan,
        course: TrainingCurriculum,
        model: Model,
        encoder: SceneEncoder,
        optimisers: Optimisers,
    ) -> None:
        """Take up the state on disk, where there is one.

        Args:
            plan: how long, where.
            course: sizes and learning rates.
            model: what is trained, on the plan's device.
            encoder: makes scenes a batch.
            optimisers: of the model's weights.
        """
        self.plan, self.course, self.model, self.encoder = plan, course, model, encoder
        self.average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.optimisers = optimisers
        self.step = 0
        self.taught_by = ""
        """Digest of the teacher's weights, where there is one."""
        self._rendered: dict[int, int] = {}
        self._pools: dict[int, ScenePool] = {}
        if state := stage.load(self.path):
            self.model.load_state_dict(state["weights"])
            self.average.load_state_dict(state["average"])
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.step, self._rendered = state["step"], state["rendered"]
            self.taught_by = state["taught_by"]

    @property
    def path(self) -> Path:
        """Return where the state lies."""
        return self.plan.folder / f"{self.course.title}.pt"

    def save(self) -> None:
        """Write the state beside the last one, then put it in its place; the first rank does."""
        if not self.plan.ranks.first:
            return
        self._rendered |= {side: pool.rendered for side, pool in self._pools.items()}
        state: dict[str, Any] = {
            "step": self.step,
            "steps": self.plan.steps,
            "seed": self.plan.seed,
            "taught_by": self.taught_by,
            "rendered": self._rendered,
            "weights": self.model.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        stage.save(self.path, state)

    def draw(self) -> SceneBatch:
        """This step's batch, on the device; seeds torch's generator for the step."""
        progress = self.step / self.plan.steps
        shares = next(part.shares for part in self.course.stages if progress < part.until)
        sides, ranks = list(shares), self.plan.ranks
        torch.manual_seed(self._moment())
        side = sides[int(torch.multinomial(torch.tensor([shares[side] for side in sides]), 1))]
        torch.manual_seed(self._moment() + 1 + ranks.rank)  # all ranks take one size, each its own rows
        rows = max(self.course.rows[side] // ranks.count, 1)
        if side not in self._pools:
            rendered = self._rendered.get(side, 0)
            self._pools[side] = ScenePool(
                self.encoder,
                side,
                self.plan.seed,
                rendered=rendered,
                ranks=ranks,
                source=self.course.source,
            )
        if self.step % FRESH_PER_STEP == 0:
            self._pools[side].refresh(rows)
        return self._pools[side].draw(rows).to(self.plan.device)

    def update(self, loss: torch.Tensor) -> None:
        """One step of both optimisers and of the average."""
        remaining = (self.plan.steps - self.step) / (COOL_DOWN * self.plan.steps)
        factor = min(1.0, (self.step + 1) / WARM_UP, remaining)
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.plan.ranks.share_gradients(self.model)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser, peak in zip(self.optimisers, self.course.rates, strict=True):
            optimiser.param_groups[0]["lr"] = peak * factor
            optimiser.step()
        self.step += 1
        decay = min(self.course.average_decay, self.step / (self.step + 9))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)

    def _moment(self) -> int:
        """A seed of this step."""
        return int(np.random.default_rng((self.plan.seed, self.step)).integers(2**31))

    def train(self, loss_of: Callable[[SceneBatch], torch.Tensor], show: Callable[[Path], None]) -> None:
        """Take the steps that are left, or those until the plan's deadline, telling, saving and showing on the way.

        Args:
            loss_of: the loss of a batch.
            show: writes a grid of sample edits.
        """
        began, first, mean_loss = time.monotonic(), self.step, 0.0
        saved = began
        steps, ranks = self.plan.steps, self.plan.ranks
        while self.step < steps and not ranks.any(self.plan.over(), self.plan.device):
            loss = loss_of(self.draw())
            self.update(loss)
            mean_loss = 0.98 * mean_loss + 0.02 * loss.item() if self.step > first + 1 else loss.item()
            if ranks.first and (self.step == steps or self.step % TELL_EVERY == 0):
                rate = (self.step - first) / (time.monotonic() - began)
                told = f"{self.course.title} {self.step}/{steps} loss {mean_loss:.4f} {rate:.2f} steps/s"
                print(f"{time.strftime('%H:%M:%S')} {told}", flush=True)
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
            if ranks.first and self.step % SHOW_EVERY == 0:
                show(self._grid)
        if self.step > first:
            self.save()
            if ranks.first:
                show(self._grid)

    @property
    def _grid(self) -> Path:
        """Return where this step's sample edits go."""
        return self.plan.folder / f"{self.course.title}-{self.step:06}.png"


def weighted_error(
    predicted: torch.Tensor,
    target: torch.Tensor,
    masked: torch.Tensor,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean squared error in which places of the mask count `MASKED_WEIGHT` times.

    Args:
        predicted: (rows, places, channels).
        target: the same.
        masked: (rows, places) bool.
        importance: (rows,) further weights of the rows' errors; None for 1.
    """
    weight = 1 + (MASKED_WEIGHT - 1) * masked.float()
    errors = (predicted - target).square().mean(-1) * weight
    if importance is not None:
        errors = errors * importance[:, None]
    return errors.sum() / weight.sum()
