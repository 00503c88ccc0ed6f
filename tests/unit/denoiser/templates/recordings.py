"""Recordings of random values, and whether two are equal."""

from __future__ import annotations

import torch

from giornata_denoiser.choices import EXACT
from giornata_denoiser.rows.template import CachedBlock, CachedTemplate, Entry, store


def template(name: str, bits: int = 8, tokens: int = 6, seed: int = 0) -> CachedTemplate:
    generator = torch.Generator().manual_seed(seed)

    def random() -> torch.Tensor:
        return torch.randn(tokens, 8, generator=generator).bfloat16()

    entries = tuple(
        Entry(
            level,
            (
                CachedBlock(key=store(random(), bits), value=store(random(), bits)),
                CachedBlock(hidden=store(random(), bits)),
                CachedBlock(border=store(random(), bits)),
                CachedBlock(moments=store(random().float(), EXACT)),
                CachedBlock(),
            ),
        )
        for level in (1.0, 0.51234567891)
    )
    return CachedTemplate(name, (2, tokens // 2), entries)


def same(one: CachedTemplate, other: CachedTemplate) -> bool:
    return told(one) == told(other) and all(map(torch.equal, tensors(one), tensors(other)))


def told(of: CachedTemplate) -> object:
    """All but the values: names, levels, and which part of which block has which tensors."""
    parts = [vars(block) for entry in of.entries for block in entry.blocks]
    kinds = [
        {name: part and [each.dtype for each in part.tensors] for name, part in each.items()}
        for each in parts
    ]
    return of.id, of.grid, [entry.level for entry in of.entries], kinds


def tensors(of: CachedTemplate) -> list[torch.Tensor]:
    parts = (part for entry in of.entries for block in entry.blocks for part in block.parts)
    return [tensor for part in parts for tensor in part.tensors]
