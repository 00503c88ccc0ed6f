"""Second stage: the transformer and the text encoders, by flow matching on encoded scenes.

Small pictures teach shapes and colours cheaply, since most of their tokens are masked; larger ones follow. The corner
of the position grid is moved at random, so that small pictures teach every position of large ones.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from diffusers import FluxFillPipeline
from torch import nn

from giornata_tools.model import architecture
from giornata_tools.model.architecture import NATIVE_PIXELS, TOKEN_PIXELS
from giornata_tools.model.painter import UNGUIDED, Painter
from giornata_tools.model.train import autoencoder, samples, stage
from giornata_tools.model.train.muon import Muon
from giornata_tools.model.train.pool import Encoder, SceneBatch, ScenePool
from giornata_tools.model.train.stage import StagePlan

MUON_RATE: Final = 4e-3
ADAM_RATE: Final = 2e-3
WARM_UP: Final = 100
COOL_DOWN: Final = 0.25
"""Last part of a run, in which the learning rates fall linearly to zero."""
EMA_DECAY: Final = 0.998
MASKED_WEIGHT: Final = 8.0
"""Loss of a token that the mask touches; the others, which the condition shows, count 1."""
FRESH_PER_STEP: Final = 8
"""One in this many rows of a batch is rendered again."""
SAVE_EVERY: Final = 250
SHOW_EVERY: Final = 500
SHOWN_SIDE: Final = 128
TELL_EVERY: Final = 50


@dataclass(frozen=True)
class Stage:
    """Which sizes are trained on, until a part of the run."""

    until: float
    shares: dict[int, float]
    """Side in pixels → part of the steps."""


STAGES: Final = (
    Stage(0.22, {48: 1.0}),
    Stage(0.27, {48: 0.2, 96: 0.45, 128: 0.25, 256: 0.1}),
    Stage(0.55, {96: 0.2, 128: 0.45, 256: 0.35}),
    Stage(0.74, {96: 0.1, 128: 0.35, 256: 0.55}),
    Stage(1.01, {128: 0.3, 256: 0.7}),
)
ROWS: Final = {48: 64, 64: 40, 96: 20, 128: 12, 256: 4}
"""Rows of a batch by side: about the same number of tokens."""


@dataclass(frozen=True)
class Course:
    """One stage of training on tokens."""

    title: str
    """Name of its state's file, and of what it tells."""
    stages: tuple[Stage, ...] = STAGES
    rate: float = 1.0
    """Factor of the learning rates."""
    guidance: float = UNGUIDED
    """At which sample grids are painted."""


PAINTER: Final = Course("painter")


class PainterRun:
    """A course on its way.

    A restart goes on with the same weights, optimisers and schedule, and with scenes that no batch has shown yet; the
    pool of scenes that batches are drawn from begins again, so that the batches themselves are others.
    """

    def __init__(self, plan: StagePlan, course: Course = PAINTER) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.course = plan, course
        self.painter = Painter(architecture.transformer(), text := architecture.text_encoders()).to(
            plan.device
        )
        self.average = copy.deepcopy(self.painter).eval().requires_grad_(requires_grad=False)
        self.optimisers = optimisers(self.painter)
        self.step = 0
        self.taught_by = ""
        """Digest of the teacher's weights, where there is one."""
        self._rendered: dict[int, int] = {}
        self._pools: dict[int, ScenePool] = {}
        vae = autoencoder.load(plan.folder).to(plan.device, memory_format=torch.channels_last)
        self.encoder = Encoder(vae, text)
        if state := stage.load(self.path):
            self.painter.load_state_dict(state["painter"])
            self.average.load_state_dict(state["average"])
            for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
                optimiser.load_state_dict(saved)
            self.step, self._rendered = state["step"], state["rendered"]
            self.taught_by = state["taught_by"]
        elif plan.start:
            self._take(plan.start)
        if plan.compiled:
            self.painter.transformer.compile(dynamic=False)

    @property
    def path(self) -> Path:
        """Where the state lies."""
        return self.plan.folder / f"{self.course.title}.pt"

    def _take(self, checkpoint: Path) -> None:
        """The weights of a checkpoint of this architecture."""
        pipeline = FluxFillPipeline.from_pretrained(checkpoint, dtype=torch.float32)
        for model in (self.painter, self.average):
            model.transformer.load_state_dict(pipeline.transformer.state_dict())
            model.clip.load_state_dict(pipeline.text_encoder.state_dict())
            model.t5.load_state_dict(pipeline.text_encoder_2.state_dict())

    def save(self) -> None:
        """Write the state beside the last one, then put it in its place; the first rank does."""
        if not self.plan.ranks.first:
            return
        self._rendered |= {side: pool.rendered for side, pool in self._pools.items()}
        state: dict[str, Any] = {
            "step": self.step,
            "steps": self.plan.steps,
            "taught_by": self.taught_by,
            "rendered": self._rendered,
            "painter": self.painter.state_dict(),
            "average": self.average.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }
        stage.save(self.path, state)

    def show(self) -> None:
        """Write a sample grid; the first rank does."""
        if self.plan.ranks.first:
            path = self.plan.folder / f"{self.course.title}-{self.step:06}.png"
            samples.show(self.average, self.encoder, path, SHOWN_SIDE, self.course.guidance)

    def draw(self) -> SceneBatch:
        """This step's batch, on the device; seeds torch's generator for the step."""
        progress = self.step / self.plan.steps
        shares = next(part.shares for part in self.course.stages if progress < part.until)
        sides, ranks = list(shares), self.plan.ranks
        torch.manual_seed(self._moment())
        side = sides[int(torch.multinomial(torch.tensor([shares[side] for side in sides]), 1))]
        torch.manual_seed(self._moment() + 1 + ranks.rank)  # all ranks take one size, each its own rows
        rows = max(ROWS[side] // ranks.count, 1)
        if side not in self._pools:
            rendered = self._rendered.get(side, 0)
            self._pools[side] = ScenePool(self.encoder, side, self.plan.seed, rendered=rendered, ranks=ranks)
        if self.step % FRESH_PER_STEP == 0:
            self._pools[side].refresh(rows)
        return self._pools[side].draw(rows).to(self.plan.device)

    def update(self, loss: torch.Tensor) -> None:
        """One step of both optimisers and of the average."""
        remaining = (self.plan.steps - self.step) / (COOL_DOWN * self.plan.steps)
        factor = self.course.rate * min(1.0, (self.step + 1) / WARM_UP, remaining)
        self.painter.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.plan.ranks.share_gradients(self.painter)
        nn.utils.clip_grad_norm_(self.painter.parameters(), 1.0)
        for optimiser, peak in zip(self.optimisers, (MUON_RATE, ADAM_RATE), strict=True):
            optimiser.param_groups[0]["lr"] = peak * factor
            optimiser.step()
        self.step += 1
        decay = min(EMA_DECAY, self.step / (self.step + 9))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.painter.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)

    def _moment(self) -> int:
        """A seed of this step."""
        return int(np.random.default_rng((self.plan.seed, self.step)).integers(2**31))


def run(plan: StagePlan) -> None:
    """Train, going on from ``painter.pt`` in the plan's folder; sample grids land there too."""
    state = PainterRun(plan)
    train(state, partial(flow_loss, state.painter))


def train(state: PainterRun, loss_of: Callable[[SceneBatch], torch.Tensor]) -> None:
    """Take the steps that are left, telling, saving and showing on the way."""
    began, first, mean_loss = time.perf_counter(), state.step, 0.0
    steps = state.plan.steps
    while state.step < steps:
        loss = loss_of(state.draw())
        state.update(loss)
        mean_loss = 0.98 * mean_loss + 0.02 * loss.item() if state.step > first + 1 else loss.item()
        last = state.step == steps
        if state.plan.ranks.first and (last or state.step % TELL_EVERY == 0):
            rate = (state.step - first) / (time.perf_counter() - began)
            print(
                f"{state.course.title} {state.step}/{steps} loss {mean_loss:.4f} {rate:.2f} steps/s",
                flush=True,
            )
        if last or state.step % SAVE_EVERY == 0:
            state.save()
        if last or state.step % SHOW_EVERY == 0:
            state.show()


def flow_loss(painter: Painter, batch: SceneBatch) -> torch.Tensor:
    """Squared error of the velocity at a logit-normal time (Esser et al., 2024, 3.1), weighted towards the mask."""
    noise = torch.randn_like(batch.clean)
    times = random_times(noise)
    t = times[:, None, None]
    velocity = painter(
        (1 - t) * batch.clean + t * noise,
        batch.condition,
        painter.read(batch.clip_ids, batch.t5_ids),
        time=times,
        guidance=torch.full_like(times, UNGUIDED),
        corner=random_corner(noise),
    )
    return weighted_error(velocity, noise - batch.clean, batch.masked)


def random_times(tokens: torch.Tensor) -> torch.Tensor:
    """(rows,) logit-normal times for (rows, tokens, channels), noisier for more tokens."""
    times = torch.sigmoid(torch.randn(len(tokens), device=tokens.device))
    return architecture.shifted(times, tokens.shape[1])


def random_corner(tokens: torch.Tensor) -> tuple[int, int]:
    """Row and column at which a square picture of (rows, tokens, channels) may begin within the native size."""
    room = NATIVE_PIXELS // TOKEN_PIXELS - round(tokens.shape[1] ** 0.5)
    row, column = torch.randint(room + 1, (2,)).tolist()
    return row, column


def weighted_error(velocity: torch.Tensor, target: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
    """Mean squared error in which tokens of the mask count `MASKED_WEIGHT` times."""
    weight = 1 + (MASKED_WEIGHT - 1) * masked.float()
    return ((velocity - target).square().mean(-1) * weight).sum() / weight.sum()


def optimisers(painter: Painter) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    """Muon for the matrices inside of the transformer's blocks, AdamW for the rest."""
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in painter.named_parameters():
        hidden = "transformer_blocks" in name and "norm" not in name and parameter.ndim == 2
        (inside if hidden else rest).append(parameter)
    adam = torch.optim.AdamW(rest, ADAM_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    return Muon(inside, MUON_RATE, weight_decay=0.01), adam
