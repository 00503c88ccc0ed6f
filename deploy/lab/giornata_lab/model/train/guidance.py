"""Third stage: guidance distillation (Meng et al., CVPR 2023, 3.1), as FLUX.1-dev was made.

The second stage's average teaches: its classifier-free guided velocity, at a scale drawn per row, is what the student
learns to predict in one forward. Requests name the scale as `guidance_scale`; the published default of Fill, 30, stands
for a classifier-free scale of about 3.4 (`classifier_free_scale`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

import torch

from giornata_lab.model.painter import UNGUIDED, Painter
from giornata_lab.model.train import painter
from giornata_lab.model.train.painter import PainterRun
from giornata_lab.model.train.pool import SceneBatch
from giornata_lab.model.train.run import CurriculumStage, TrainingCurriculum, weighted_error
from giornata_lab.model.train.stage import StagePlan, TrainingStateUnusable, digest

GREATEST: Final = 60.0
"""Guidance is learnt from `UNGUIDED` up to this."""
UNITS_PER_SCALE: Final = 12.0
GUIDANCE_UNITS: Final = 1000.0
"""`FluxTransformer2DModel.forward` scales guidance by this before it embeds it."""
USUAL: Final = 30.0
"""What requests get that do not say: the default of Fill."""
SHARES: Final = {48: 0.1, 96: 0.3, 128: 0.3, 256: 0.3}
RATES: Final = (0.35 * painter.RATES[0], 0.35 * painter.RATES[1])
GUIDANCE: Final = TrainingCurriculum("guidance", (CurriculumStage(1.01, SHARES),), painter.ROWS, RATES)


def classifier_free_scale(guidance: torch.Tensor) -> torch.Tensor:
    """The classifier-free scale for which `guidance` stands; 1 where it is `UNGUIDED`."""
    return 1 + (guidance - UNGUIDED) / UNITS_PER_SCALE


def run(plan: StagePlan) -> None:
    """Distil from the average in ``painter.pt``, going on from ``guidance.pt``, both in the plan's folder.

    Raises:
        Unusable: there is no painter to learn from, or ``guidance.pt`` learnt from another one.
    """
    taught = PainterRun(plan)
    if taught.step == 0 and plan.start is None:
        raise TrainingStateUnusable(
            f"{taught.path} is missing: train the painter first, or name a checkpoint by --start"
        )
    teacher = taught.average
    weights = digest(teacher)
    student = PainterRun(replace(plan, seed=plan.seed + 1), GUIDANCE)
    if student.step == 0:
        for model in (student.model, student.average):
            model.load_state_dict(teacher.state_dict())
            level_guidance(model)
        student.taught_by = weights
    elif student.taught_by != weights:
        raise TrainingStateUnusable(
            f"{student.path} learnt from another painter than the present one: remove it to begin again"
        )
    blank = (ids.to(plan.device) for ids in student.encoder.tokenize([""]))
    nothing = teacher.read(*blank)
    student.train(
        lambda batch: _loss(teacher, student.model, batch, nothing), partial(painter.show, student, USUAL)
    )


@torch.no_grad()
def level_guidance(painter: Painter) -> None:
    """Have every guidance embedded as `UNGUIDED` is, the only one seen so far, so that no other begins as noise."""
    embed = painter.transformer.time_text_embed
    last = embed.guidance_embedder.linear_2
    scaled = torch.tensor([UNGUIDED * GUIDANCE_UNITS]).to(last.bias)
    seen = embed.guidance_embedder(embed.time_proj(scaled).to(last.bias.dtype))
    last.bias.copy_(seen[0])
    last.weight.zero_()


def _loss(
    teacher: Painter, student: Painter, batch: SceneBatch, nothing: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    noise = torch.randn_like(batch.clean)
    rows = len(noise)
    times = painter.random_times(noise)
    noisy = batch.clean + times[:, None, None] * (noise - batch.clean)
    guidance = UNGUIDED + (GREATEST - UNGUIDED) * torch.rand(rows, device=noise.device)
    unguided = torch.full_like(guidance, UNGUIDED)
    corner = painter.random_corner(noise)
    with torch.no_grad():
        read = teacher.read(*batch.token_ids)
        blank = (nothing[0].expand(rows, -1, -1), nothing[1].expand(rows, -1))
        asked, free = (
            teacher(noisy, batch.condition, text, time=times, guidance=unguided, corner=corner)
            for text in (read, blank)
        )
        target = free + classifier_free_scale(guidance)[:, None, None] * (asked - free)
    read = student.read(*batch.token_ids)
    velocity = student(noisy, batch.condition, read, time=times, guidance=guidance, corner=corner)
    return weighted_error(velocity, target, batch.masked)
