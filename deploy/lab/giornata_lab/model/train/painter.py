"""Second and third stage of fresco: the transformer and the text encoders by flow matching, then their guidance.

Small pictures teach shapes and colours cheaply, since most of their tokens are masked; larger ones follow. The corner
of the position grid is moved at random, so that small pictures teach every position of large ones.

The third stage is guidance distillation (Meng et al., CVPR 2023, 3.1), as FLUX.1-dev was made. The second stage's
average teaches: its classifier-free guided velocity, at a scale drawn per row, is what the student learns to predict in
one forward. Requests name the scale as `guidance_scale`; the published default of Fill, 30, stands for a
classifier-free scale of about 3.4 (`classifier_free_scale`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from diffusers import AutoencoderKL

from giornata_lab.model.fill import (
    NATIVE_PIXELS,
    TEXT_TOKENS,
    TOKEN_PIXELS,
    UNGUIDED,
    Painter,
    pack,
    pack_mask,
    shifted,
    text_encoders,
    transformer,
)
from giornata_lab.model.random.text_encoders import TextEncoders
from giornata_lab.model.scenes import Scene
from giornata_lab.model.train import autoencoder
from giornata_lab.model.train.run import (
    CurriculumStage,
    SceneBatch,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    TrainingStateUnusable,
    digest,
    encode_both,
    in_blocks,
    masks_of,
    optimisers,
    weighted_error,
)

RATES: Final = (4e-3, 2e-3)
"""Learning rates of Muon and of AdamW."""
STAGES: Final = (
    CurriculumStage(0.22, {48: 1.0}),
    CurriculumStage(0.27, {48: 0.2, 96: 0.45, 128: 0.25, 256: 0.1}),
    CurriculumStage(0.55, {96: 0.2, 128: 0.45, 256: 0.35}),
    CurriculumStage(0.74, {96: 0.1, 128: 0.35, 256: 0.55}),
    CurriculumStage(1.01, {128: 0.3, 256: 0.7}),
)
ROWS: Final = {48: 64, 64: 40, 96: 20, 128: 12, 256: 4}
"""Rows of a batch by side: about the same number of tokens."""
PAINTER: Final = TrainingCurriculum("painter", STAGES, ROWS, RATES)


@dataclass(frozen=True)
class FillEncoder:
    """What makes scenes a batch of tokens: the trained autoencoder and both tokenizers."""

    vae: AutoencoderKL
    text: TextEncoders

    def encode(self, scenes: Sequence[Scene]) -> SceneBatch:
        """Clean (rows, tokens, 32), condition (rows, tokens, 96), masked (rows, tokens)."""
        clean, blanked = (pack(part) for part in encode_both(self.vae, scenes))
        mask = pack_mask(masks_of(scenes).float()).to(clean)
        condition = torch.cat([blanked, mask], dim=-1)
        return SceneBatch(
            clean.bfloat16().cpu(),
            condition.bfloat16().cpu(),
            mask.any(-1).cpu(),
            self.tokenize([scene.caption for scene in scenes]),
        )

    def tokenize(self, captions: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """CLIP's and T5's ids, (captions, TEXT_TOKENS) each.

        CLIP pads to 77; its pooled output is that of the first end token, which sees nothing after it.
        """
        shape = {
            "padding": "max_length",
            "truncation": True,
            "max_length": TEXT_TOKENS,
            "return_tensors": "pt",
        }
        return (
            self.text.clip_tokenizer(captions, **shape).input_ids,
            self.text.t5_tokenizer(captions, **shape).input_ids,
        )


class PainterRun(TrainingRun[Painter]):
    """A course of the painter on its way."""

    def __init__(self, plan: StagePlan, course: TrainingCurriculum = PAINTER) -> None:
        torch.manual_seed(plan.seed)
        text = text_encoders()
        painter = Painter(transformer(), text).to(plan.device)
        vae = autoencoder.load(plan.folder).to(plan.device, memory_format=torch.channels_last)
        self.encoder = FillEncoder(vae, text)
        super().__init__(plan, course, painter, self.encoder.encode, optimisers(painter, in_blocks, RATES))


def run(plan: StagePlan) -> None:
    """Train, going on from ``painter.pt`` in the plan's folder."""
    state = PainterRun(plan, PAINTER)
    state.train(partial(flow_loss, state.model))


def flow_loss(
    painter: Any, batch: SceneBatch, guidance: tuple[float, float] = (UNGUIDED, UNGUIDED)
) -> torch.Tensor:
    """Squared error of the velocity at a logit-normal time (Esser et al., 2024, 3.1), weighted towards the mask.

    `painter` is alone or has an adapter. Each row has a scale between the two of `guidance`; the target is the same for
    all.
    """
    noise = torch.randn_like(batch.clean)
    times = random_times(noise)
    t = times[:, None, None]
    velocity = painter(
        (1 - t) * batch.clean + t * noise,
        batch.condition,
        painter.read(*batch.token_ids),
        time=times,
        guidance=guidance[0] + (guidance[1] - guidance[0]) * torch.rand_like(times),
        corner=random_corner(noise),
    )
    return weighted_error(velocity, noise - batch.clean, batch.masked)


def random_times(tokens: torch.Tensor) -> torch.Tensor:
    """(rows,) logit-normal times for (rows, tokens, channels), noisier for more tokens."""
    times = torch.sigmoid(torch.randn(len(tokens), device=tokens.device))
    return shifted(times, tokens.shape[1])


def random_corner(tokens: torch.Tensor) -> tuple[int, int]:
    """Row and column at which a square picture of (rows, tokens, channels) may begin within the native size."""
    room = NATIVE_PIXELS // TOKEN_PIXELS - round(tokens.shape[1] ** 0.5)
    row, column = torch.randint(room + 1, (2,)).tolist()
    return row, column


GREATEST: Final = 60.0
"""Guidance is learnt from `UNGUIDED` up to this."""
UNITS_PER_SCALE: Final = 12.0
GUIDANCE_UNITS: Final = 1000.0
"""`FluxTransformer2DModel.forward` scales guidance by this before it embeds it."""
SHARES: Final = {48: 0.1, 96: 0.3, 128: 0.3, 256: 0.3}
GUIDANCE: Final = TrainingCurriculum(
    "guidance", (CurriculumStage(1.01, SHARES),), ROWS, (0.35 * RATES[0], 0.35 * RATES[1])
)


def classifier_free_scale(guidance: torch.Tensor) -> torch.Tensor:
    """The classifier-free scale for which `guidance` stands; 1 where it is `UNGUIDED`."""
    return 1 + (guidance - UNGUIDED) / UNITS_PER_SCALE


def distil(plan: StagePlan) -> None:
    """Distil from the average in ``painter.pt``, going on from ``guidance.pt``, both in the plan's folder.

    Raises:
        Unusable: there is no painter to learn from, or ``guidance.pt`` learnt from another one.
    """
    taught = PainterRun(plan)
    if taught.step == 0:
        raise TrainingStateUnusable(f"{taught.path} is missing: train the painter first")
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
    student.train(lambda batch: distillation_loss(teacher, student.model, batch, nothing))


@torch.no_grad()
def level_guidance(painter: Painter) -> None:
    """Have every guidance embedded as `UNGUIDED` is, the only one seen so far, so that no other begins as noise."""
    embed = painter.transformer.time_text_embed
    last = embed.guidance_embedder.linear_2
    scaled = torch.tensor([UNGUIDED * GUIDANCE_UNITS]).to(last.bias)
    seen = embed.guidance_embedder(embed.time_proj(scaled).to(last.bias.dtype))
    last.bias.copy_(seen[0])
    last.weight.zero_()


def distillation_loss(
    teacher: Painter, student: Painter, batch: SceneBatch, nothing: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Squared error to the teacher's guided velocity, at a random guidance; `nothing` is the empty caption read."""
    noise = torch.randn_like(batch.clean)
    rows = len(noise)
    times = random_times(noise)
    noisy = batch.clean + times[:, None, None] * (noise - batch.clean)
    guidance = UNGUIDED + (GREATEST - UNGUIDED) * torch.rand(rows, device=noise.device)
    unguided = torch.full_like(guidance, UNGUIDED)
    corner = random_corner(noise)
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
