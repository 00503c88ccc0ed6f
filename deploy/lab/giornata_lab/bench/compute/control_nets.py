"""Random ControlNets for a random Flux, in the proportion of real ones, and diffusers' step with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from diffusers import FluxControlNetModel, FluxMultiControlNetModel
from torch import Tensor
from torch.nn import functional

from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Row
from giornata_lab.bench.compute.diffusers_steps import DiffusersStep
from giornata_lab.bench.compute.models import CHANNELS, REAL, transformer_of

BLOCKS: Final = ((5, 10), (6, 0), (4, 0))
"""Double and single blocks of a union net and of two others, as published for FLUX.1-dev with its 19 and 38."""
SIZE: Final = 0.02
"""Standard deviation of the layers that make samples, which are zeros before training."""


def saved(family: ModelFamily, folder: Path) -> str:
    """Write three ControlNets; returns the configuration that names them."""
    names = []
    for nth, blocks in enumerate(BLOCKS):
        where = folder / f"net{nth}"
        _made(family, blocks, nth).save_pretrained(where)
        names.append(f"net{nth}={where}")
    return ",".join(names)


def _made(family: ModelFamily, blocks: tuple[int, int], seed: int) -> FluxControlNetModel:
    config = transformer_of(family).config
    doubles, singles = (
        round(count / REAL[name] * config[name])
        for count, name in zip(blocks, ("num_layers", "num_single_layers"), strict=True)
    )
    kept = ("attention_head_dim", "num_attention_heads", "joint_attention_dim", "pooled_projection_dim",
            "axes_dims_rope", "guidance_embeds")  # fmt: skip
    torch.manual_seed(seed + 1)
    kind: Any = FluxControlNetModel
    net: FluxControlNetModel = kind(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=max(1, doubles),
        num_single_layers=singles,
        **{name: config[name] for name in kept},
    )
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if name.startswith("controlnet_"):
                weight.normal_(0, SIZE)
    return net.to(family.dtype).eval()


class ControlledStep(DiffusersStep):
    """What a ControlNet pipeline's loop does in one step: three forwards of `nets`, then that of the transformer."""

    def __init__(
        self,
        family: ModelFamily,
        batch: Sequence[Row],
        texts: Sequence[Mapping[str, Tensor]],
        nets: Sequence[Any],
    ) -> None:
        super().__init__("flux", transformer_of(family), family, batch, texts)
        self._module, self._nets = transformer_of(family), FluxMultiControlNetModel(list(nets))
        self._hints = [
            torch.stack([row.control_images[nth] for row in batch]).to(family.dtype)
            for nth in range(len(nets))
        ]
        self._forward = self._controlled

    def _controlled(self, latents: Tensor) -> Tensor:
        cells = torch.cartesian_prod(*(torch.arange(side) for side in self.grid))
        embeds = self.text["prompt_embeds"]
        shared = {
            "encoder_hidden_states": embeds,
            "pooled_projections": self.text["pooled_prompt_embeds"],
            "timestep": self.time / 1000,
            "guidance": torch.full((len(latents),), 3.5),
            "img_ids": functional.pad(cells, (1, 0)).to(self.of.dtype),
            "txt_ids": torch.zeros(embeds.shape[1], 3, dtype=self.of.dtype),
            "return_dict": False,
        }
        count = len(self._hints)
        doubles, singles = self._nets(
            latents,
            controlnet_cond=self._hints,
            controlnet_mode=[torch.zeros(len(latents), dtype=torch.int64)] * count,  # read by unions alone
            conditioning_scale=[1.0] * count,
            **shared,
        )
        out: Tensor = self._module(
            latents, controlnet_block_samples=doubles, controlnet_single_block_samples=singles, **shared
        )[0]
        return out
