"""Recordings of random values, and whether two are equal."""

from __future__ import annotations

import torch

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
                CachedBlock(),
            ),
        )
        for level in (1.0, 0.51234567891)
    )
    return CachedTemplate(name, (2, tokens // 2), entries)


def same(one: CachedTemplate, other: CachedTemplate) -> bool:
    parts = [
        [
            part
            for entry in t.entries
            for block in entry.blocks
            for part in (block.key, block.value, block.hidden)
        ]
        for t in (one, other)
    ]
    return (one.id, one.grid, [e.level for e in one.entries]) == (
        other.id,
        other.grid,
        [e.level for e in other.entries],
    ) and all(
        (a is None and b is None)
        or (
            a is not None
            and b is not None
            and torch.equal(a.data, b.data)
            and (a.scale is None) == (b.scale is None)
            and (a.scale is None or (torch.equal(a.scale, b.scale) and torch.equal(a.low, b.low)))
        )
        for a, b in zip(*parts, strict=True)
    )
