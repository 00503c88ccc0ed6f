"""The prompts of a UNet, and what the network computes of them once for all steps of a row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from giornata.packed.low_rank import LowRankHooks
from giornata.packed.packing import to_device
from giornata_denoiser.families.unet.structure import UnetStructure

TIME_IDS = 6
"""SDXL's micro-conditioning: original size, crop and target size, height before width."""


@dataclass(frozen=True, eq=False)
class UnetPrompt:
    """One sequence's prompt; satisfies :class:`giornata_denoiser.rows.row.Prompt`."""

    embeds: Tensor
    """(text_tokens, cross_attention_dim)"""
    pooled: Tensor | None
    """(pooled_dim,); None for Stable Diffusion 1 and 2."""
    time_ids: Tensor | None
    """(6,), as `pooled`."""
    kept_channels: int
    """Channels of the keys and values that the network's blocks make of a text token."""

    @property
    def joint_tokens(self) -> int:
        """None: text is attended to, and passes no block."""
        return 0

    @property
    def padding_tokens(self) -> int:
        """None."""
        return 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its tensors, and of the keys and values that are made of them."""
        own = sum(part.nbytes for part in (self.embeds, self.pooled, self.time_ids) if part is not None)
        return own + len(self.embeds) * self.kept_channels * self.embeds.itemsize

    def to(self, device: torch.device) -> UnetPrompt:
        """The same prompt on `device`; itself where it is there."""
        if self.embeds.device == device:
            return self
        pooled, time_ids = (
            None if part is None else to_device(part, device) for part in (self.pooled, self.time_ids)
        )
        return replace(self, embeds=to_device(self.embeds, device), pooled=pooled, time_ids=time_ids)


@dataclass(frozen=True)
class UnetPromptBuilder:
    """A builder of UNets' prompt tensors; satisfies :class:`giornata_denoiser.families.protocol.PromptBuilder`."""

    tensors: Mapping[str, tuple[int | None, ...]]
    kept_channels: int

    def prompt(
        self,
        tensors: Mapping[str, Tensor],
        grid: tuple[int, int],  # noqa: ARG002 - protocol
        guidance_scale: float,  # noqa: ARG002 - protocol
    ) -> UnetPrompt:
        """The tensors as they are; guidance is classifier-free."""
        return UnetPrompt(
            tensors["prompt_embeds"],
            tensors.get("pooled_prompt_embeds"),
            tensors.get("add_time_ids"),
            self.kept_channels,
        )


class PreparedPrompt(NamedTuple):
    """The tensors that a network makes of a prompt, for all steps of a track."""

    modulation: Tensor
    """(steps, channels): what the timestep adds in each resnet, one after the other."""
    text: tuple[tuple[Tensor, Tensor], ...]
    """By attention: keys and values of the text, (text_tokens, heads, head_dim) each."""


def prepare_prompt(
    unet: Any, structure: UnetStructure, prompt: UnetPrompt, times: Tensor, low_ranks: LowRankHooks
) -> PreparedPrompt:
    """See :class:`PreparedPrompt`; `times` are (steps,). Rounds to the dtype where diffusers does.

    The hooks add what the prompt's LoRAs make.
    """
    dtype = prompt.embeds.dtype
    embedding = _run(unet.time_embedding, _run(unet.time_proj, times).to(dtype))
    if prompt.pooled is not None and prompt.time_ids is not None:
        sizes = _run(unet.add_time_proj, prompt.time_ids.float()).flatten()
        embedding = embedding + _run(unet.add_embedding, torch.cat((prompt.pooled, sizes.to(dtype)))[None])
    parts = []
    for resnet in structure.resnets:
        activated = resnet.nonlinearity(embedding)
        parts.append(_run(resnet.time_emb_proj, activated))
        low_ranks.add(resnet.time_emb_proj, activated, parts[-1])
    text = []
    for leaf in structure.attentions:
        attn = leaf.module.attn2
        key, value = attn.to_k(prompt.embeds), attn.to_v(prompt.embeds)
        text.append(
            (key.view(len(key), attn.heads, -1), value.view(len(value), attn.heads, -1)),
        )
    return PreparedPrompt(torch.cat(parts, dim=1), tuple(text))


def _run(module: Any, *inputs: Tensor) -> Tensor:
    """Return what the module's class computes: a network answers calls of the module itself from what is prepared."""
    out: Tensor = type(module).forward(module, *inputs)
    return out
