"""The adapters that ship, trained on the frozen model: two LoRAs with PEFT, and the ControlNet `outline`.

`swapped`: under the LoRA a caption is to mean what the caption with exchanged colours means without it (distillation,
as Gandikota et al., ICCV 2023, erase concepts). `outlined`: under the LoRA the model is to paint what it paints without
it, and rims; both see the same noise, over the picture with and without them. The model teaches both at every guidance.

`outline` tells a Flux-Fill place, size, turn and shape of what is painted. It is a smaller copy of the network's first
blocks (Zhang et al., ICCV 2023, 3.1), which sees the noisy latents and the control image's, and no mask. Scenes are
those whose masks tell none of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from diffusers import FluxControlNetModel, FluxFillPipeline, FluxTransformer2DModel
from peft import LoraConfig
from torch import nn

from giornata_lab.model.adapters import lessons
from giornata_lab.model.fill import PATCH_CHANNELS, UNGUIDED, Painter, beside_tokens, encode, pack
from giornata_lab.model.random.text_encoders import TextEncoders
from giornata_lab.model.scenes import Scene
from giornata_lab.model.train.painter import GREATEST, FillEncoder, flow_loss, random_corner, random_times
from giornata_lab.model.train.run import (
    CurriculumStage,
    Model,
    Optimisers,
    SceneBatch,
    StagePlan,
    TrainingCurriculum,
    TrainingRun,
    TrainingStateUnusable,
    adam,
    as_input,
    digest,
    in_blocks,
    optimisers,
    weighted_error,
)
from giornata_tools.checkout import TRAINED


@dataclass(frozen=True)
class FrozenFillCheckpoint:
    """A trained Flux-Fill checkpoint; no weight is learnt on."""

    painter: Painter
    encoder: FillEncoder
    digest: str
    """Digest of the painter's weights, as `stage.digest` tells it."""


def load_frozen(plan: StagePlan) -> FrozenFillCheckpoint:
    """The checkpoint that ships, in float32 on the plan's device."""
    pipeline = FluxFillPipeline.from_pretrained(TRAINED, dtype=torch.float32)
    text = TextEncoders(
        pipeline.text_encoder, pipeline.tokenizer, pipeline.text_encoder_2, pipeline.tokenizer_2
    )
    painter = Painter(pipeline.transformer, text).to(plan.device).eval()
    painter.requires_grad_(requires_grad=False)
    vae = pipeline.vae.to(plan.device).eval().requires_grad_(requires_grad=False)
    return FrozenFillCheckpoint(painter, FillEncoder(vae, text), digest(painter))


def begin_on(run: TrainingRun[Model], base: FrozenFillCheckpoint) -> None:
    """Note what a new run is trained for.

    Raises:
        Unusable: the run's state was trained for another model.
    """
    if run.step == 0:
        run.taught_by = base.digest
    elif run.taught_by != base.digest:
        raise TrainingStateUnusable(
            f"{run.path} was trained for another model than the present one: remove it to begin again"
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


def swapped_batch(fill: FillEncoder, scenes: Sequence[Scene]) -> SceneBatch:
    """A batch with four texts: both tokenizers' ids of what a caption is to mean, and of the caption."""
    captions = [scene.caption for scene in scenes]
    asked = fill.tokenize([lessons.swapped_caption(caption) for caption in captions])
    return replace(fill.encode(scenes), token_ids=(*asked, *fill.tokenize(captions)))


def rimmed_batch(fill: FillEncoder, scenes: Sequence[Scene]) -> SceneBatch:
    """A batch whose clean (rows, tokens, 2 * 32) holds the plain answer, then the one with rims."""
    batch = fill.encode(scenes)
    rimmed = fill.encode([lessons.outlined(scene) for scene in scenes]).clean
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
    encode: Callable[[FillEncoder, Sequence[Scene]], SceneBatch]
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
        rimmed_batch,
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
        swapped_batch,
        swap_loss,
    ),
}


def resumed_lora(name: str, plan: StagePlan) -> TrainingRun[Painter]:
    """The run of ``<name>.pt`` in the plan's folder, or a new one.

    Raises:
        Unusable: the state was trained for another model.
    """
    on, lesson = load_frozen(plan), LESSONS[name]
    torch.manual_seed(plan.seed)
    config = LoraConfig(r=lesson.rank, lora_alpha=lesson.rank, target_modules=list(lesson.modules))
    on.painter.transformer.add_adapter(config, name)
    state = TrainingRun(
        plan, lesson.course, on.painter, partial(lesson.encode, on.encoder), factor_optimisers(on.painter)
    )
    begin_on(state, on)
    return state


def run_lora(name: str, plan: StagePlan) -> None:
    """Train, going on from ``<name>.pt`` in the plan's folder."""
    state = resumed_lora(name, plan)
    state.train(partial(LESSONS[name].loss, state.model))


def factor_optimisers(painter: nn.Module) -> Optimisers:
    """AdamW for the factors that read, and for those that write."""
    named = [(name, weights) for name, weights in painter.named_parameters() if weights.requires_grad]
    factors = ([weights for name, weights in named if part in name] for part in (".lora_A.", ".lora_B."))
    reading, writing = map(adam, factors, RATES)
    return reading, writing


DOUBLE, SINGLE = 1, 2
"""Blocks of the ControlNet: half of what the network has, so that each output serves two blocks."""
OUTLINE: Final = TrainingCurriculum(
    "outline",
    (CurriculumStage(0.55, {64: 1.0}), CurriculumStage(1.01, {64: 0.35, 128: 0.65})),
    rows={64: 40, 128: 12},
    rates=(2e-3, 3e-3),
    average_decay=0.98,
    source=lessons.sample_free,
)
GUIDANCES: Final = (UNGUIDED, GREATEST)
"""Least and greatest scale: one that it has not seen would break pictures, and an outline leaves little to guide."""


def controlled_batch(fill: FillEncoder, scenes: Sequence[Scene]) -> SceneBatch:
    """A batch whose condition ends with the latents of the outlines of what is asked for: (rows, tokens, 96 + 32)."""
    batch = fill.encode(scenes)
    images = [lessons.control_image(scene.asked, len(scene.mask)) for scene in scenes]
    control = encode(fill.vae, as_input(torch.from_numpy(np.stack(images)), fill.vae))
    packed = pack(control).to(batch.condition)
    return replace(batch, condition=torch.cat([batch.condition, packed], dim=-1))


class ControlledPainter(nn.Module):
    """A frozen painter and a ControlNet that adds to its blocks."""

    def __init__(self, painter: Painter, net: FluxControlNetModel) -> None:
        super().__init__()
        self.painter: Painter = painter
        self.net: FluxControlNetModel = net

    def read(self, clip_ids: torch.Tensor, t5_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Painter.read`."""
        return self.painter.read(clip_ids, t5_ids)

    def forward(
        self,
        noisy: torch.Tensor,
        condition: torch.Tensor,
        text: tuple[torch.Tensor, torch.Tensor],
        *,
        time: torch.Tensor,
        guidance: torch.Tensor,
        corner: tuple[int, int] = (0, 0),
    ) -> torch.Tensor:
        """Velocity (rows, tokens, 32); `condition` is a :func:`controlled_batch`'s, all else as `Painter.forward`."""
        seen, control = condition[..., :-PATCH_CHANNELS], condition[..., -PATCH_CHANNELS:]
        told = beside_tokens(noisy, text, time=time, guidance=guidance, corner=corner)
        double, single = self.net(hidden_states=noisy, controlnet_cond=control, **told)
        velocity: torch.Tensor = self.painter.transformer(
            hidden_states=torch.cat([noisy, seen], dim=-1),
            controlnet_block_samples=double,
            controlnet_single_block_samples=single,
            **told,
        )[0]
        return velocity


def controlnet(transformer: FluxTransformer2DModel) -> FluxControlNetModel:
    """A ControlNet that begins with `transformer`'s first blocks and adds nothing yet."""
    config = transformer.config
    net = FluxControlNetModel(
        in_channels=PATCH_CHANNELS,
        num_layers=DOUBLE,
        num_single_layers=SINGLE,
        patch_size=config.patch_size,
        attention_head_dim=config.attention_head_dim,
        num_attention_heads=config.num_attention_heads,
        joint_attention_dim=config.joint_attention_dim,
        pooled_projection_dim=config.pooled_projection_dim,
        guidance_embeds=config.guidance_embeds,
        axes_dims_rope=config.axes_dims_rope,
    )
    for name in ("time_text_embed", "context_embedder"):
        getattr(net, name).load_state_dict(getattr(transformer, name).state_dict())
    for name, blocks in (("transformer_blocks", DOUBLE), ("single_transformer_blocks", SINGLE)):
        getattr(net, name).load_state_dict(getattr(transformer, name)[:blocks].state_dict())
    embedder = transformer.x_embedder  # the noisy latents come first
    net.x_embedder.load_state_dict(
        {"weight": embedder.weight[:, :PATCH_CHANNELS].clone(), "bias": embedder.bias.clone()}
    )
    return net


def resumed_control(plan: StagePlan) -> tuple[TrainingRun[nn.Module], ControlledPainter]:
    """The run of ``outline.pt`` in the plan's folder, or a new one; and the painter of its averaged weights.

    Raises:
        Unusable: the state was trained for another model.
    """
    on: FrozenFillCheckpoint = load_frozen(plan)
    torch.manual_seed(plan.seed)
    net = controlnet(on.painter.transformer).to(plan.device)
    net.requires_grad_(requires_grad=True)
    weights = optimisers(net, in_blocks, OUTLINE.rates)
    run: TrainingRun[nn.Module] = TrainingRun(
        plan, OUTLINE, net, partial(controlled_batch, on.encoder), weights
    )
    begin_on(run, on)
    return run, ControlledPainter(on.painter, run.model)


def run_control(plan: StagePlan) -> None:
    """Train, going on from ``outline.pt`` in the plan's folder."""
    state, painter = resumed_control(plan)
    state.train(partial(flow_loss, painter, guidance=GUIDANCES))
