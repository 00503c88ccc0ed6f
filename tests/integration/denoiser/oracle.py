"""One checkpoint in float64, as diffusers runs it and as the denoiser does: edits and what they end with."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FluxFillPipeline, FluxInpaintPipeline, FluxPipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image
from torch import Tensor

from giornata.scheduling.batch import Capacity, RowKey
from giornata.tensors import pack, unpack
from giornata_denoiser.checkpoint import Checkpoint, load
from giornata_denoiser.engine.engine import Engine
from giornata_denoiser.families.rows import build_row
from giornata_denoiser.rows.row import Row
from giornata_denoiser.rows.step_cache import TaylorRule
from giornata_lab.bench.compute import tiny_flux

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Edit:
    """One edit, as given to the pipeline and to the engine."""

    width: int = 96
    height: int = 64
    steps: int = 5
    strength: float = 1.0
    guidance_scale: float = 3.5
    true_cfg_scale: float = 1.0
    seed: int = 7

    @property
    def grid(self) -> tuple[int, int]:
        return self.height // 16, self.width // 16


@dataclass(frozen=True)
class Model:
    """A checkpoint, as diffusers has it and as the denoiser loaded it from disk."""

    pipeline: Any
    checkpoint: Checkpoint

    @property
    def dtype(self) -> torch.dtype:
        return self.checkpoint.family.dtype


def make_model(folder: Path, *, fill: bool = False, guidance: bool = True) -> Model:
    torch.manual_seed(1)
    autoencoder: Any = AutoencoderKL
    vae = autoencoder(
        block_out_channels=[8, 16, 16, 16],
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    kind: Any = FluxFillPipeline if fill else FluxInpaintPipeline
    pipeline = kind(
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(tiny_flux.SCHEDULER),
        vae=vae,
        transformer=tiny_flux.transformer(fill=fill, guidance=guidance),
        text_encoder=None,
        tokenizer=None,
        text_encoder_2=None,
        tokenizer_2=None,
    )
    pipeline.save_pretrained(folder)
    (folder / "tokenizer_2").mkdir()
    (folder / "tokenizer_2" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 48}))
    pipeline.to(torch.float64).set_progress_bar_config(disable=True)
    return Model(pipeline, load(folder, dtype=torch.float64, device=CPU))


def picture_and_mask(edit: Edit) -> tuple[Image.Image, Image.Image]:
    random = np.random.default_rng(0)
    picture = Image.fromarray(random.integers(0, 255, (edit.height, edit.width, 3), dtype=np.uint8))
    mask = np.zeros((edit.height, edit.width), np.uint8)
    mask[edit.height // 4 : edit.height // 2 + 5, edit.width // 3 : edit.width * 2 // 3 + 3] = 255
    return picture, Image.fromarray(mask)


def text_inputs(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"prompt_embeds": (9, tiny_flux.JOINT_DIM), "pooled_prompt_embeds": (tiny_flux.POOLED_DIM,)}
    names = [*shapes.items(), *((f"negative_{name}", shape) for name, shape in shapes.items())]
    return {name: torch.randn(*shape, generator=generator).to(dtype) for name, shape in names}


def diffusers_latent(model: Model, edit: Edit) -> Tensor:
    """(tokens, 64): what the pipeline ends with."""
    picture, mask = picture_and_mask(edit)
    return _run(model.pipeline, model, edit, image=picture, mask_image=mask, strength=edit.strength)


def generated_latent(model: Model, edit: Edit) -> Tensor:
    """(tokens, 64): what the text-to-image pipeline of the checkpoint ends with."""
    return _run(_generating(model), model, edit)


def _generating(model: Model) -> Any:
    """The text-to-image pipeline over the same modules."""
    parts = ("scheduler", "vae", "transformer", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
    kind: Any = FluxPipeline
    made = kind(**{name: getattr(model.pipeline, name) for name in parts})
    made.set_progress_bar_config(disable=True)
    return made


def _run(pipeline: Any, model: Model, edit: Edit, **pictures: Any) -> Tensor:
    given: dict[str, Any] = {name: tensor[None] for name, tensor in text_inputs(model.dtype).items()}
    if edit.true_cfg_scale > 1:
        given["true_cfg_scale"] = edit.true_cfg_scale
    else:
        given = {name: tensor for name, tensor in given.items() if not name.startswith("negative_")}
    result: Tensor = pipeline(
        **given,
        **pictures,
        height=edit.height,
        width=edit.width,
        num_inference_steps=edit.steps,
        guidance_scale=edit.guidance_scale,
        generator=torch.Generator().manual_seed(edit.seed),
        output_type="latent",
        max_sequence_length=48,
    ).images
    return result[0]


@torch.inference_mode()
def conditioning(model: Model, edit: Edit) -> dict[str, Tensor]:
    """The row's tensors, drawn by the pipeline's own methods in its own order."""
    pipe = model.pipeline
    picture, mask = picture_and_mask(edit)
    generator = torch.Generator().manual_seed(edit.seed)
    image = pipe.image_processor.preprocess(picture, height=edit.height, width=edit.width).to(model.dtype)
    binary = pipe.mask_processor.preprocess(mask, height=edit.height, width=edit.width)
    image_latents = pipe._encode_vae_image(image, generator)
    noise = randn_tensor(image_latents.shape, generator=generator, dtype=model.dtype)
    shape = (1, 16, *image_latents.shape[2:])
    sizes = (1, 16, 1, edit.height, edit.width, model.dtype, CPU, generator)
    packed_mask, masked = pipe.prepare_mask_latents(binary, image * (1 - binary), *sizes)
    tensors = {
        "noise": pipe._pack_latents(noise, *shape),
        "image_latents": pipe._pack_latents(image_latents, *shape),
    }
    tensors |= {"mask": packed_mask, "masked_image_latents": masked}
    return {name: tensor[0] for name, tensor in tensors.items()}


def noise(model: Model, edit: Edit) -> dict[str, Tensor]:
    """The tensors of a generated row, drawn by the text-to-image pipeline."""
    generator = torch.Generator().manual_seed(edit.seed)
    drawn, _ = _generating(model).prepare_latents(1, 16, edit.height, edit.width, model.dtype, CPU, generator)
    return {"noise": drawn[0]}


def row(model: Model, edit: Edit, tensors: dict[str, Tensor]) -> Row:
    """The edit's row, through the bytes that travel."""
    text = unpack(pack(text_inputs(model.dtype)))
    return build_row(
        model.checkpoint.family,
        RowKey("job", 1, 0),
        grid=edit.grid,
        track=model.checkpoint.family.schedule.track(
            sampler=model.checkpoint.family.schedule.default_sampler,
            steps=edit.steps,
            strength=edit.strength,
            cells=edit.grid[0] * edit.grid[1],
        ),
        text=text,
        conditioning=unpack(pack(tensors)),
        guidance_scale=edit.guidance_scale,
        true_cfg_scale=edit.true_cfg_scale,
        generated=tensors.keys() == {"noise"},
    )


def engine_latent(
    model: Model, edit: Edit, tensors: dict[str, Tensor], cache: TaylorRule | None = None
) -> Tensor:
    latent, _ = cached_latent(model, edit, tensors, cache)
    return latent


def cached_latent(
    model: Model, edit: Edit, tensors: dict[str, Tensor], cache: TaylorRule | None
) -> tuple[Tensor, list[int]]:
    """What the engine ends with, and how many blocks each of its computed steps skipped."""
    ticks = count()
    engine = Engine(model.checkpoint.family, Capacity(rows=1, tokens=1), lambda: float(next(ticks)))
    engine.batch.submit([replace(row(model, edit, tensors), step_cache=cache)])
    latent, skipped = None, []
    while (report := engine.step()) is not None:
        assert report.failed == ()
        latent = report.advanced[0].latent
        skipped += [] if report.sample is None else [report.sample.skipped_blocks]
    assert latent is not None
    return latent, skipped
