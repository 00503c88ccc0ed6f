"""Tiny transformers of the driven families with random weights, rows of any family, and diffusers' own forwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from diffusers import (
    ChromaTransformer2DModel,
    Flux2Transformer2DModel,
    QwenImage21Transformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImageTransformer2DModel,
)
from diffusers.models.transformers import transformer_qwenimage21
from diffusers.models.transformers.transformer_flux2 import (
    Flux2KVAttnProcessor,
    Flux2KVParallelSelfAttnProcessor,
)
from torch import Tensor
from torch.nn import functional

from giornata.scheduling.batch import RowKey
from giornata.tensors import PROMPT_MASK
from giornata.wire.models import Sampler
from giornata_denoiser.families.driven.chroma import Chroma
from giornata_denoiser.families.driven.flux2 import Flux2, Flux2Klein, Flux2KleinKV
from giornata_denoiser.families.driven.network import DrivenNetwork
from giornata_denoiser.families.driven.qwen_image import QwenImage, QwenImage21, QwenImageEdit
from giornata_denoiser.families.driven.sd3 import StableDiffusion3
from giornata_denoiser.families.driven.z_image import ZImage
from giornata_denoiser.families.network import ModelFamily, build_row
from giornata_denoiser.families.sampling import FlowMatching, shifted_always
from giornata_denoiser.rows.row import GENERATOR, Row, Snapshot
from giornata_lab.bench.compute.tiny_flux import MIXING, SCHEDULER, Spec

TEXT = 24
"""Channels of a text token."""
POOLED = 20
LATENT = 64
"""Channels of a packed token: 2x2 latent pixels of 16 channels."""
SHAPE: dict[str, Any] = {
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": TEXT,
}
ROPE = (4, 6, 6)
Alone = Callable[[Any, Row], Any]
"""(tokens, channels): diffusers' own output of a row's next step by the unhooked transformer."""


def _sd3() -> Any:
    kind: Any = SD3Transformer2DModel
    sizes = {"sample_size": 16, "in_channels": 16, "pos_embed_max_size": 16, "pooled_projection_dim": POOLED}
    return kind(
        num_layers=4,
        **SHAPE,
        **sizes,
        caption_projection_dim=32,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )


def _chroma() -> Any:
    kind: Any = ChromaTransformer2DModel
    small = {"approximator_num_channels": 16, "approximator_hidden_dim": 32, "approximator_layers": 1}
    return kind(in_channels=LATENT, num_layers=2, num_single_layers=2, **SHAPE, axes_dims_rope=ROPE, **small)


def _qwen_image() -> Any:
    kind: Any = QwenImageTransformer2DModel
    return kind(in_channels=LATENT, num_layers=4, **SHAPE, axes_dims_rope=ROPE)


def _qwen_image_2511() -> Any:
    kind: Any = QwenImageTransformer2DModel
    return kind(in_channels=LATENT, num_layers=4, **SHAPE, axes_dims_rope=ROPE, zero_cond_t=True)


def _qwen_image_21() -> Any:
    kind: Any = QwenImage21Transformer2DModel
    shape = {"attention_head_dim": 16, "num_attention_heads": 2, "context_in_dim": TEXT}
    return kind(in_channels=LATENT, out_channels=LATENT, num_layers=4, **shape, axes_dims_rope=ROPE)


def _flux2(*, guidance_embeds: bool = False) -> Any:
    kind: Any = Flux2Transformer2DModel
    return kind(
        in_channels=LATENT,
        num_layers=2,
        num_single_layers=2,
        **SHAPE,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def _flux2_kv() -> Any:
    """With the processors that its pipeline sets."""
    model = _flux2()
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    return model


def _z_image() -> Any:
    kind: Any = ZImageTransformer2DModel
    model = kind(
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=TEXT,
        axes_dims=[4, 6, 6],
        axes_lens=[128, 16, 16],
    )
    with torch.no_grad():
        model.x_pad_token.normal_()
        model.cap_pad_token.normal_()
    return model


def _time(row: Row) -> Tensor:
    return row.track.times[row.step : row.step + 1]


def _fraction(row: Row) -> Tensor:
    """The time as pipelines tell it: rounded to the latent's dtype before it is divided."""
    return _time(row).to(row.latent.dtype) / 1000


def _pixels(row: Row) -> Tensor:
    """(channels, height, width) of a packed latent."""
    height, width = row.grid
    return row.latent.view(height, width, -1, 2, 2).permute(2, 0, 3, 1, 4).reshape(-1, 2 * height, 2 * width)


def _packed(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    height, width = grid
    return pixels.view(-1, height, 2, width, 2).permute(1, 3, 0, 2, 4).reshape(height * width, -1)


def _text(row: Row, name: str = "prompt_embeds") -> Tensor:
    prompt: Any = row.inputs.prompts[0]
    tensors: Mapping[str, Tensor] = prompt.tensors
    return tensors[name][None]


def _padded(row: Row) -> tuple[Tensor, Tensor]:
    """The prompt with three tokens behind it, and which of all are its own."""
    text = functional.pad(_text(row), (0, 0, 0, 3), value=1.0)
    return text, torch.arange(text.shape[1])[None] < text.shape[1] - 3


def _grid_ids(row: Row) -> Tensor:
    return torch.cartesian_prod(*(torch.arange(float(side)) for side in row.grid))


def _sd3_alone(model: Any, row: Row) -> Tensor:
    pooled = _text(row, "pooled_prompt_embeds")
    out = model(_pixels(row)[None], _text(row), pooled, _time(row), return_dict=False)[0][0]
    return _packed(out, row.grid)


def _chroma_alone(model: Any, row: Row) -> Any:
    """The prompt padded, its padding masked; the pipeline's own mask only dims it (diffusers #12116)."""
    text, mask = _padded(row)
    mask = functional.pad(mask, (0, len(row.latent)), value=True)
    image_ids, text_ids = functional.pad(_grid_ids(row), (1, 0)), torch.zeros(text.shape[1], 3)
    return model(row.latent[None], text, _fraction(row), image_ids, text_ids, mask, return_dict=False)[0][0]


def _qwen_image_alone(model: Any, row: Row) -> Any:
    """As the pipeline calls it: the prompt padded, its padding masked."""
    text, mask = _padded(row)
    shapes = [[(1, *row.grid)]]
    return model(row.latent[None], text, mask, _fraction(row), shapes, return_dict=False)[0][0]


def _qwen_image_edit_alone(model: Any, row: Row) -> Any:
    """As the pipelines call it: clean tokens behind the noisy ones, the picture's own and those of references."""
    clean = [
        row.inputs.conditioning[name]
        for name in ("image_latents", "references")
        if name in row.inputs.conditioning
    ]
    shapes = [[(1, *row.grid), *((1, *grid) for grid in row.inputs.beside)]]
    both = torch.cat((row.latent, *clean))
    out = model(both[None], _text(row), None, _fraction(row), shapes, return_dict=False)[0][0]
    return out[: len(row.latent)]


def _flux2_alone(model: Any, row: Row) -> Any:
    """As the pipeline calls it: the picture's clean tokens behind the noisy ones."""
    text, picture = _text(row), functional.pad(_grid_ids(row), (1, 1))
    reference = picture + torch.tensor([10.0, 0, 0, 0])
    text_ids = functional.pad(torch.arange(float(text.shape[1]))[:, None], (3, 0))
    both = torch.cat((row.latent, row.inputs.conditioning["image_latents"]))[None]
    ids = torch.cat((picture, reference))
    prompt: Any = row.inputs.prompts[0]
    guidance = torch.tensor([prompt.guidance_scale]) if model.config.guidance_embeds else None
    return model(both, text, _fraction(row), ids, text_ids, guidance, return_dict=False)[0][
        0, : len(row.latent)
    ]


def references(row: Row) -> tuple[Tensor, Tensor]:
    """(1, tokens, channels) and positions of Klein-KV's references: the picture itself, then those of the request."""
    ids = [
        torch.cartesian_prod(
            torch.tensor([10.0 * (at + 1)]), *map(torch.arange, map(float, grid)), torch.zeros(1)
        )
        for at, grid in enumerate(row.inputs.beside)
    ]
    given = row.inputs.conditioning.get("references", row.latent[:0])
    return torch.cat((row.inputs.conditioning["image_latents"], given))[None], torch.cat(ids)


def _flux2_kv_alone(model: Any, row: Row) -> Any:
    """As the pipeline's first step calls it: clean references before the noisy picture."""
    text, picture = _text(row), functional.pad(_grid_ids(row), (1, 1))
    text_ids = functional.pad(torch.arange(float(text.shape[1]))[:, None], (3, 0))
    clean, ids = references(row)
    return model(
        torch.cat((clean, row.latent[None]), dim=1),
        text,
        _fraction(row),
        torch.cat((ids, picture)),
        text_ids,
        return_dict=False,
        kv_cache_mode="extract",
        num_ref_tokens=clean.shape[1],
    )[0][0]


def _qwen_image_21_alone(model: Any, row: Row) -> Any:
    """As the pipeline's first step calls it.

    The module counts a picture in slots of four tokens, the pipeline's sizes being multiples of 2x2 tokens. With slots
    of one token it takes any picture; those that it does not add by itself stand behind the text.
    """
    text, cells = _text(row), row.image_tokens
    slots = functional.pad(text, (0, 0, 0, cells - cells // 4))
    marked = torch.arange(text.shape[1] + cells)[None] >= text.shape[1]
    with mock.patch.object(transformer_qwenimage21, "_IMG_TOKENS_PER_SLOT", 1):
        shapes = [[(1, *row.grid)]]
        out = model(row.latent[None], slots, _fraction(row), shapes, marked, return_dict=False)[0][0]
    return out[text.shape[1] :]


def _z_image_alone(model: Any, row: Row) -> Tensor:
    time = (1000 - _time(row)) / 1000
    out = model([_pixels(row)[:, None]], time, list(_text(row)), return_dict=False)[0][0]
    return -_packed(out[:, 0], row.grid)


@dataclass(frozen=True)
class Driven:
    """One driven family."""

    network: type[DrivenNetwork]
    make: Callable[[], Any]
    alone: Alone


FAMILIES: Mapping[str, Driven] = {
    "sd3": Driven(StableDiffusion3, _sd3, _sd3_alone),
    "chroma": Driven(Chroma, _chroma, _chroma_alone),
    "qwen-image": Driven(QwenImage, _qwen_image, _qwen_image_alone),
    "qwen-image-edit": Driven(QwenImageEdit, _qwen_image, _qwen_image_edit_alone),
    "qwen-image-edit-plus": Driven(QwenImageEdit, _qwen_image_2511, _qwen_image_edit_alone),
    "qwen-image-2.1": Driven(QwenImage21, _qwen_image_21, _qwen_image_21_alone),
    "flux2": Driven(Flux2, partial(_flux2, guidance_embeds=True), _flux2_alone),
    "flux2-klein-kv": Driven(Flux2KleinKV, _flux2_kv, _flux2_kv_alone),
    "flux2-klein": Driven(Flux2Klein, _flux2, _flux2_alone),
    "z-image": Driven(ZImage, _z_image, _z_image_alone),
}
SHARPER = (".attn.", ".attn2.", ".attention.", "mod", ".linear.")
"""Parts of the names of weights that let tokens mix, and times show."""


def transformer(name: str) -> Any:
    """The family's transformer, as diffusers makes it; equal for equal names. In double precision."""
    torch.manual_seed(0)
    model = FAMILIES[name].make()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if any(part in weight_name for part in SHARPER) and weight.ndim == 2:
                weight.mul_(MIXING)
    return torch.nn.Module.to(model, torch.float64).eval().requires_grad_(requires_grad=False)


@cache
def family(name: str, dtype: torch.dtype = torch.float64) -> ModelFamily:
    """The family, driven."""
    network = FAMILIES[name].network(torch.nn.Module.to(transformer(name), dtype))
    return ModelFamily(network.text, FlowMatching(SCHEDULER, shifted_always), network)


@cache
def unhooked(name: str) -> Any:
    """The transformer of :func:`family`, without hooks."""
    return transformer(name)


def alone(name: str, row: Row) -> Tensor:
    """(tokens, channels): the output of the row's next step, by the module's own forward."""
    with torch.no_grad():
        out: Tensor = FAMILIES[name].alone(unhooked(name), row)
        return out


def row(
    of: ModelFamily,
    spec: Spec,
    references: Sequence[tuple[int, int]] = (),
    *,
    sampler: Sampler | None = None,
    resume: Snapshot | None = None,
) -> Row:
    """The row of `spec` in any family, with references of so many tokens in height and width.

    The same arguments make an equal row.
    """
    generator = torch.Generator().manual_seed(spec.seed)

    def random(*shape: int | None) -> Tensor:
        sides = [spec.text_tokens if side is None else side for side in shape]
        return torch.randn(*sides, generator=generator)

    text = {name: random(*shape) for name, shape in of.text.tensors.items()}
    if spec.true_cfg_scale > 1:
        text |= {f"negative_{name}": random(*shape) for name, shape in of.text.tensors.items()}
    if spec.padding_tokens:
        told = (torch.arange(spec.text_tokens) < spec.text_tokens - spec.padding_tokens).to(torch.uint8)
        text |= {f"{sign}{PROMPT_MASK}": told for sign in ("", "negative_")[: 1 + (spec.true_cfg_scale > 1)]}
    cells = spec.grid[0] * spec.grid[1]
    tensors = {name: random(cells, channels) for name, channels in of.network.conditioning.items()}
    tensors["mask"] = (tensors["mask"] > 0).float()
    track = of.schedule.track(
        sampler=sampler or of.schedule.default_sampler, steps=spec.steps, strength=spec.strength, cells=cells
    )
    if any(track.draws):
        tensors[GENERATOR] = torch.Generator().manual_seed(spec.seed).get_state()
    return build_row(
        of,
        RowKey(spec.job_id, spec.attempt, spec.index),
        grid=spec.grid,
        track=track,
        text=text,
        conditioning=tensors,
        guidance_scale=spec.guidance_scale,
        true_cfg_scale=spec.true_cfg_scale,
        references=[random(*grid, LATENT) for grid in references],
        resume=resume,
    )
