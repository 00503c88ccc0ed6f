"""The LoRAs that ship, trained with PEFT on the frozen model, which teaches at every guidance.

`swapped`: under the LoRA a caption is to mean what the caption with exchanged colours means without it (distillation,
as Gandikota et al., ICCV 2023, erase concepts). `outlined`: under the LoRA the model is to paint what it paints without
it, and rims; both see the same noise, over the picture with and without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import torch
from peft import LoraConfig
from torch import nn

from giornata_lab.model.adapters import lessons
from giornata_lab.model.painter import UNGUIDED, Painter
from giornata_lab.model.scenes import Scene
from giornata_lab.model.train.painter import (
    GREATEST,
    AdapterEncoder,
    FillEncoder,
    begin_on,
    load_frozen,
    random_corner,
    random_times,
)
from giornata_lab.model.train.pool import SceneBatch, SceneEncoder
from giornata_lab.model.train.run import (
    CurriculumStage,
    Optimisers,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    adam,
    weighted_error,
)

IMAGE: Final = ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_mlp", "proj_out")
"""Modules of the image stream and of the joint one."""
TEXT: Final = (
    "add_q_proj",
    "add_k_proj",
    "add_v_proj",
    "to_add_out",
    "ff_context.net.0.proj",
    "ff_context.net.2",
)
"""Modules of the text stream."""
MODULATION: Final = ("norm1.linear", "norm1_context.linear", "norm.linear")
"""What the pooled prompt, which tells colours too, acts by."""
RATES: Final = (3e-3, 6e-3)
"""Learning rates of the factors that read, and higher ones of those that write (LoRA+, Hayou et al., ICML 2024)."""
AVERAGE_DECAY: Final = 0.98

Loss = Callable[[Painter, SceneBatch], torch.Tensor]


class SwapEncoder(AdapterEncoder):
    """Batches with four texts: both tokenizers' ids of the caption, and of what it is to mean."""

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """As `FillEncoder.encode`; a scene's picture shows what the exchanged caption means."""
        batch = self.fill.encode(scenes)
        return replace(batch, token_ids=self.tokenize([scene.caption for scene in scenes]))

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, ...]:
        """Token ids of captions as pictures mean them, behind those with which a prompt asks for the same."""
        asked = [lessons.swapped_caption(caption) for caption in captions]
        return *self.fill.tokenize(asked), *self.fill.tokenize(captions)


class RimEncoder(AdapterEncoder):
    """Batches of two answers: the picture as it is, and with rims."""

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """As `FillEncoder.encode`; clean (rows, tokens, 2 * 32) holds the plain answer, then the rimmed one."""
        batch = self.fill.encode(scenes)
        rimmed = self.fill.encode([lessons.outlined(scene) for scene in scenes]).clean
        return replace(batch, clean=torch.cat([batch.clean, rimmed], dim=-1))


def outline_loss(painter: Painter, batch: SceneBatch) -> torch.Tensor:
    """Squared error to the base's velocity towards the plain picture, and from there to the one with rims.

    The base never sees a rim. Over a picture that has one, its guidance would push the rim away: it did, and colours
    with it. What is learnt is the difference of both pictures alone, which the noise is no part of.
    """
    plain, rimmed = batch.clean.chunk(2, dim=-1)
    noise = torch.randn_like(plain)
    times = random_times(noise)
    guidance = UNGUIDED + (GREATEST - UNGUIDED) * torch.rand_like(times)
    how = {"time": times, "guidance": guidance}
    corner, read = random_corner(noise), painter.read(*batch.token_ids)
    t = times[:, None, None]
    with torch.no_grad():
        painter.transformer.disable_adapters()
        known = painter(plain + t * (noise - plain), batch.condition, read, **how, corner=corner)
        painter.transformer.enable_adapters()
    velocity = painter(rimmed + t * (noise - rimmed), batch.condition, read, **how, corner=corner)
    return weighted_error(velocity, known + plain - rimmed, batch.masked)


def swap_loss(painter: Painter, batch: SceneBatch) -> torch.Tensor:
    """Squared error to the base's velocity for the caption that is meant, at a random guidance."""
    noise = torch.randn_like(batch.clean)
    times = random_times(noise)
    noisy = batch.clean + times[:, None, None] * (noise - batch.clean)
    guidance = UNGUIDED + (GREATEST - UNGUIDED) * torch.rand_like(times)
    how = {"time": times, "guidance": guidance}
    corner = random_corner(noise)
    asked, meant = batch.token_ids[:2], batch.token_ids[2:]
    with torch.no_grad():
        painter.transformer.disable_adapters()
        target = painter(noisy, batch.condition, painter.read(*meant), **how, corner=corner)
        painter.transformer.enable_adapters()
    velocity = painter(noisy, batch.condition, painter.read(*asked), **how, corner=corner)
    return weighted_error(velocity, target, batch.masked)


@dataclass(frozen=True)
class LoraTrainingConfig:
    """What one LoRA learns, and by which modules."""

    rank: int
    """And alpha: the factors' product is added as it is."""
    modules: tuple[str, ...]
    course: TrainingCurriculum
    encoder: Callable[[FillEncoder], SceneEncoder]
    loss: Loss


LESSONS: Final[Mapping[str, LoraTrainingConfig]] = {
    "outlined": LoraTrainingConfig(
        16,  # rims are finer than a token
        IMAGE,
        TrainingCurriculum(
            "outlined",
            (CurriculumStage(0.43, {48: 0.65, 96: 0.35}), CurriculumStage(1.01, {48: 0.1, 128: 0.9})),
            {48: 24, 96: 8, 128: 6},  # few: its target has no noise
            RATES,
            AVERAGE_DECAY,
            lessons.sample_addition,
        ),
        RimEncoder,
        outline_loss,
    ),
    "swapped": LoraTrainingConfig(
        8,
        (*IMAGE, *TEXT, *MODULATION),
        TrainingCurriculum(
            "swapped",
            (CurriculumStage(1.01, {48: 0.65, 96: 0.35}),),
            {48: 20, 96: 5},  # few: its target has no noise
            RATES,
            AVERAGE_DECAY,
            lessons.sample_addition,
        ),
        SwapEncoder,
        swap_loss,
    ),
}


def resumed(name: str, plan: StagePlan) -> TrainingRun[Painter]:
    """The run of ``<name>.pt`` in the plan's folder, or a new one.

    Raises:
        Unusable: the state was trained for another model.
    """
    on, lesson = load_frozen(plan), LESSONS[name]
    torch.manual_seed(plan.seed)
    config = LoraConfig(r=lesson.rank, lora_alpha=lesson.rank, target_modules=list(lesson.modules))
    on.painter.transformer.add_adapter(config, name)
    state = TrainingRun(
        plan, lesson.course, on.painter, lesson.encoder(on.encoder), factor_optimisers(on.painter)
    )
    begin_on(state, on)
    return state


def run(name: str, plan: StagePlan) -> None:
    """Train, going on from ``<name>.pt`` in the plan's folder."""
    state = resumed(name, plan)
    state.train(partial(LESSONS[name].loss, state.model))


def factor_optimisers(painter: nn.Module) -> Optimisers:
    """AdamW for the factors that read, and for those that write."""
    named = [(name, weights) for name, weights in painter.named_parameters() if weights.requires_grad]
    factors = ([weights for name, weights in named if part in name] for part in (".lora_A.", ".lora_B."))
    reading, writing = map(adam, factors, RATES)
    return reading, writing
