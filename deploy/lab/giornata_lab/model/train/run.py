"""Training: scenes to draw batches from, a state on disk, an optimiser, and the loops that every stage runs in.

A state is written whole or not at all, and read without unpickling anything but tensors.
"""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import nn

from giornata_lab.model.fill import encode
from giornata_lab.model.scenes import Scene, sample

FIRST: Final = {48: 2048, 64: 512, 96: 512, 128: 512, 256: 192}
"""Scenes encoded before the first batch, by side in pixels."""
CAPACITY: Final = {48: 30_000, 64: 8_000, 96: 10_000, 128: 8_000, 256: 1_200}
LEAST_MASK_PX: Final = {48: 25.0, 64: 25.0, 96: 25.0, 128: 24.0, 256: 24.0}
UNCONDITIONAL: Final = 0.1
"""Part of the captions that is dropped."""
ENCODE_AT_ONCE: Final = 32


@dataclass(frozen=True)
class SceneBatch:
    """What one step trains on. All (rows, ...); places are tokens of a transformer or latent pixels of a UNet."""

    clean: torch.Tensor
    """Normalised latents of the answer."""
    condition: torch.Tensor
    """What the network sees beside the noisy latents: latents of the masked picture, and the mask."""
    masked: torch.Tensor
    """(rows, places) bool: the mask touches the place."""
    token_ids: tuple[torch.Tensor, ...]
    """(rows, text tokens) int64 of each tokenizer."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in this order."""
        return self.clean, self.condition, self.masked, *self.token_ids

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> SceneBatch:
        """The batch whose `tensors` these are."""
        clean, condition, masked, *token_ids = tensors
        return SceneBatch(clean, condition, masked, tuple(token_ids))

    def to(self, device: torch.device) -> SceneBatch:
        """The same on `device`; latents in float32."""
        return SceneBatch(
            self.clean.float().to(device),
            self.condition.float().to(device),
            self.masked.to(device),
            tuple(ids.to(device) for ids in self.token_ids),
        )

    def __getitem__(self, rows: torch.Tensor) -> SceneBatch:
        return SceneBatch.of([tensor[rows] for tensor in self.tensors])


SceneEncoder = Callable[[Sequence[Scene]], SceneBatch]
"""Makes scenes of one size a batch on the CPU, whose latents are stored in bfloat16."""
SceneSource = Callable[[np.random.Generator, int], Scene]
"""A random scene of so many pixels a side."""


def usual(rng: np.random.Generator, side: int) -> Scene:
    """Return what the models that ship learn from."""
    return sample(rng, side, least_mask_px=LEAST_MASK_PX[side])


def as_input(pictures: torch.Tensor, vae: AutoencoderKL) -> torch.Tensor:
    """(rows, side, side, 3) uint8 → (rows, 3, side, side) in [-1, 1], on the autoencoder's device."""
    device = next(vae.parameters()).device
    return pictures.permute(0, 3, 1, 2).to(device).float() / 127.5 - 1


def masks_of(scenes: Sequence[Scene]) -> torch.Tensor:
    """(scenes, side, side) bool."""
    return torch.from_numpy(np.stack([scene.mask for scene in scenes]))


def encode_both(vae: AutoencoderKL, scenes: Sequence[Scene]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised latents (rows, channels, height, width) of the answers, and of them with the mask blanked."""
    x = as_input(torch.from_numpy(np.stack([scene.after for scene in scenes])), vae)
    blanked = x * ~masks_of(scenes).to(x.device)[:, None]
    return encode(vae, x), encode(vae, blanked)


class ScenePool:
    """Scenes of one size. The same seed and the same calls give the same batches."""

    def __init__(
        self,
        encode: SceneEncoder,
        side: int,
        seed: int,
        *,
        rendered: int = 0,
        source: SceneSource = usual,
    ) -> None:
        """Render and encode the first scenes.

        Args:
            encode: of pictures and captions.
            side: of the pictures, in pixels.
            seed: of the scenes.
            rendered: scenes that were rendered before a restart.
            source: of the scenes.
        """
        self._encode_scenes, self._side, self._seed, self._source = encode, side, seed, source
        self.rendered = rendered
        """Scenes that were rendered so far in the whole run: a restart goes on with new ones."""
        self._all = self._encode(FIRST[side])
        self._oldest = 0

    def refresh(self, count: int) -> None:
        """Add `count` fresh scenes; when the pool is full they replace the oldest."""
        fresh = self._encode(count)
        if len(self._all.clean) < CAPACITY[self._side]:
            self._all = _concatenate([self._all, fresh])
            return
        end = min(self._oldest + count, len(self._all.clean))
        for mine, new in zip(self._all.tensors, fresh.tensors, strict=True):
            mine[self._oldest : end] = new[: end - self._oldest]
        self._oldest = end % len(self._all.clean)

    def draw(self, rows: int) -> SceneBatch:
        """A random batch, by torch's generator."""
        return self._all[torch.randint(len(self._all.clean), (rows,))]

    def _encode(self, count: int) -> SceneBatch:
        firsts = range(0, count, ENCODE_AT_ONCE)
        return _concatenate([self._render(min(ENCODE_AT_ONCE, count - first)) for first in firsts])

    def _render(self, count: int) -> SceneBatch:
        scenes = []
        for _ in range(count):
            rng = np.random.default_rng((self._seed, self._side, self.rendered))
            self.rendered += 1
            scene = self._source(rng, self._side)
            scenes.append(replace(scene, caption="") if rng.uniform() < UNCONDITIONAL else scene)
        return self._encode_scenes(scenes)


def _concatenate(parts: list[SceneBatch]) -> SceneBatch:
    columns = zip(*(part.tensors for part in parts), strict=True)
    return SceneBatch.of([torch.cat(column) for column in columns])


class TrainingStateUnusable(Exception):
    """A state on disk that the stage at hand cannot go on from, or build on."""


@dataclass(frozen=True)
class StagePlan:
    """What is to be trained, and where."""

    folder: Path
    """State and results."""
    steps: int
    """Steps in total, the ones before a restart included."""
    seed: int
    """Seed of weights, scenes and noise."""
    device: torch.device
    deadline: float = math.inf
    """When the stage is to stop with its state saved, in seconds of `time.monotonic`."""

    def over(self) -> bool:
        """Return whether the deadline has passed."""
        return time.monotonic() > self.deadline


def save_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` (tensors, numbers, strings and containers of them); a kill at any moment leaves a whole file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load_state(path: Path) -> dict[str, Any] | None:
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


TELL_EVERY: Final = 50
SAVE_EVERY_S: Final = 180.0
GREATEST_GRADIENT: Final = 1.0
MOST_SKIPPED: Final = 10
"""Steps in a row whose gradients are not finite."""

Losses = dict[str, torch.Tensor]
"""Scalars by name; `loss` is what is minimised."""
Model = TypeVar("Model", bound=nn.Module)
Optimisers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]
"""Muon for the matrices, AdamW for the rest."""


class TrainingLoop(Generic[Model]):
    """A stage's steps, from wherever ``<title>.pt`` in the plan's folder stopped."""

    def __init__(
        self,
        title: str,
        plan: StagePlan,
        model: Model,
        optimisers: Optimisers,
        rates: tuple[float, float],
    ) -> None:
        """Take up the state on disk, where there is one.

        Args:
            title: name of the stage, and of its state's file.
            plan: how long, where.
            model: what is trained, on the plan's device.
            optimisers: of the model's weights.
            rates: greatest learning rates of both.
        """
        self.title, self.plan, self.model = title, plan, model
        self.optimisers, self._rates = optimisers, rates
        self.step = 0
        """Steps that were taken, before a restart too."""
        self._skipped = 0
        if state := load_state(self.path):
            self.take(state)

    @property
    def path(self) -> Path:
        """Return where the state lies."""
        return self.plan.folder / f"{self.title}.pt"

    def take(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.model.load_state_dict(state["weights"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step = state["step"]

    def state(self) -> dict[str, Any]:
        """Return what a restart goes on from."""
        return {
            "step": self.step,
            "steps": self.plan.steps,
            "seed": self.plan.seed,
            "weights": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
        }

    def save(self) -> None:
        """Write the state beside the last one, then put it in its place."""
        save_state(self.path, self.state())

    def moment(self) -> int:
        """A seed of this step."""
        return int(np.random.default_rng((self.plan.seed, self.step)).integers(2**31))

    def run(self, loss_of: Callable[[int], Losses], rate_factor: Callable[[int], float]) -> bool:
        """Take the steps that are left, or those until the plan's deadline; tell whether all are taken.

        Args:
            loss_of: the losses of a step; torch's generator is seeded for it.
            rate_factor: factor of the learning rates at a step.

        Raises:
            Unusable: gradients of many steps in a row are not finite; of few they are left out.
        """
        began, first, steps = time.monotonic(), self.step, self.plan.steps
        saved = began
        while self.step < steps and not self.plan.over():
            torch.manual_seed(self.moment())
            losses = loss_of(self.step)
            self.update(losses["loss"], rate_factor(self.step))
            if self.step == steps or self.step % TELL_EVERY == 0:
                rate = (self.step - first) / (time.monotonic() - began)
                told = " ".join(f"{name} {float(value.detach()):.4f}" for name, value in losses.items())
                print(f"{self.title} {self.step}/{steps} {told} {rate:.2f} steps/s", flush=True)
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
        if self.step > first:
            self.save()
        return self.step >= steps

    def update(self, loss: torch.Tensor, rate_factor: float) -> None:
        """One step of both optimisers."""
        self.model.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), GREATEST_GRADIENT)
        self.step += 1
        if not norm.isfinite():  # a step less, where the weights would be lost
            self._skipped += 1
            if self._skipped > MOST_SKIPPED:
                raise TrainingStateUnusable(
                    f"{self.title}: the gradients of {self._skipped} steps in a row were not finite"
                )
            return
        self._skipped = 0
        for optimiser, peak in zip(self.optimisers, self._rates, strict=True):
            optimiser.param_groups[0]["lr"] = peak * rate_factor
            optimiser.step()


def adam(weights: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    """AdamW as every stage has it."""
    return torch.optim.AdamW(weights, rate, betas=(0.9, 0.99), weight_decay=0.0)


def optimisers(
    model: nn.Module,
    hidden: Callable[[str, nn.Parameter], bool],
    rates: tuple[float, float],
    weight_decay: float = 0.01,
) -> Optimisers:
    """Muon for the `hidden` matrices and kernels by name, AdamW for the rest.

    Args:
        model: whose weights are trained.
        hidden: tells what lies between other layers.
        rates: greatest learning rates of both.
        weight_decay: of Muon.
    """
    inside: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (inside if hidden(name, parameter) else rest).append(parameter)
    return Muon(inside, rates[0], weight_decay=weight_decay), adam(rest, rates[1])


def coder_optimisers(coder: nn.Module, rates: tuple[float, float]) -> Optimisers:
    """Muon for the kernels between hidden layers of an encoder, a decoder or both, AdamW for all else."""
    ends = ("conv_in.weight", "conv_out.weight")
    return optimisers(coder, lambda name, weights: weights.ndim == 4 and not name.endswith(ends), rates, 0.0)


def in_blocks(name: str, weights: nn.Parameter) -> bool:
    """Return whether these are a matrix inside of a Flux network's blocks."""
    return "transformer_blocks" in name and "norm" not in name and weights.ndim == 2


def cosine(step: int, steps: int) -> float:
    """Factor of the learning rates: warm up for 50 steps, then fall along a cosine."""
    return min(1.0, (step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * step / steps)))


WARM_UP: Final = 100
COOL_DOWN: Final = 0.25
"""Last part of a run, in which the learning rates fall linearly to zero."""
MASKED_WEIGHT: Final = 8.0
"""Loss of a place that the mask touches; the others, which the condition shows, count 1."""
FRESH_PER_STEP: Final = 8
"""One in this many rows of a batch is rendered again."""


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


class TrainingRun(TrainingLoop[Model]):
    """A course on its way, with the average of the model's weights.

    A restart goes on with the same weights, optimisers and schedule, and with scenes that no batch has shown yet; the
    pool of scenes that batches are drawn from begins again, so that the batches themselves are others.
    """

    def __init__(
        self,
        plan: StagePlan,
        course: TrainingCurriculum,
        model: Model,
        encode: SceneEncoder,
        optimisers: Optimisers,
    ) -> None:
        """Take up the state on disk, where there is one.

        Args:
            plan: how long, where.
            course: sizes and learning rates.
            model: what is trained, on the plan's device.
            encode: makes scenes a batch.
            optimisers: of the model's weights.
        """
        self.course, self.encode = course, encode
        self.average = copy.deepcopy(model).eval().requires_grad_(requires_grad=False)
        self.taught_by = ""
        """Digest of the teacher's weights, where there is one."""
        self._rendered: dict[int, int] = {}
        self._pools: dict[int, ScenePool] = {}
        super().__init__(course.title, plan, model, optimisers, course.rates)

    def take(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        super().take(state)
        self.average.load_state_dict(state["average"])
        self._rendered, self.taught_by = state["rendered"], state["taught_by"]

    def state(self) -> dict[str, Any]:
        """Return what a restart goes on from."""
        self._rendered |= {side: pool.rendered for side, pool in self._pools.items()}
        return {
            **super().state(),
            "taught_by": self.taught_by,
            "rendered": self._rendered,
            "average": self.average.state_dict(),
        }

    def train(self, loss_of: Callable[[SceneBatch], torch.Tensor]) -> None:
        """Take the steps that are left, or those until the plan's deadline, with the losses of batches."""

        def rate_factor(step: int) -> float:
            remaining = (self.plan.steps - step) / (COOL_DOWN * self.plan.steps)
            return min(1.0, (step + 1) / WARM_UP, remaining)

        self.run(lambda _: {"loss": loss_of(self._draw())}, rate_factor)

    def update(self, loss: torch.Tensor, rate_factor: float) -> None:
        """One step of both optimisers and of the average."""
        super().update(loss, rate_factor)
        decay = min(self.course.average_decay, self.step / (self.step + 9))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(now, 1 - decay)

    def _draw(self) -> SceneBatch:
        """This step's batch, on the device; seeds torch's generator again."""
        progress = self.step / self.plan.steps
        shares = next(part.shares for part in self.course.stages if progress < part.until)
        sides = list(shares)
        side = sides[int(torch.multinomial(torch.tensor([shares[side] for side in sides]), 1))]
        torch.manual_seed(self.moment() + 1)
        rows = self.course.rows[side]
        if side not in self._pools:
            rendered, source = self._rendered.get(side, 0), self.course.source
            self._pools[side] = ScenePool(self.encode, side, self.plan.seed, rendered=rendered, source=source)
        if self.step % FRESH_PER_STEP == 0:
            self._pools[side].refresh(rows)
        return self._pools[side].draw(rows).to(self.plan.device)


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
