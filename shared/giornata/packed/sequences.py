"""What a forward sees of every step of a batch, and which of its tokens a block computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from giornata.packed.packing import Layout, bounds, layout, segment_index
from giornata.packed.region import Region

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, (tokens, head_dim) float32 each."""


@dataclass(frozen=True, eq=False)
class Live:
    """The tokens that a block computes: all text tokens and, of each sequence, all image tokens or its region's."""

    whole: tuple[bool, ...]
    """By sequence: whether all of its image tokens are computed."""
    layout: Layout
    image: Tensor
    """(live_image_tokens,) int64: their positions in the image stream of all tokens."""
    rotary: Rotary
    """In the joint order of `layout`."""


@dataclass(frozen=True, eq=False)
class Beyond:
    """The outside tokens of some sequences, packed by sequence."""

    lengths: tuple[int, ...]
    owner: Tensor
    """(tokens,) int64: which of these sequences each belongs to."""
    rotary: Rotary


@dataclass(frozen=True, eq=False)
class Sequences:
    """What the transformer sees of every step of a batch besides latents and timesteps; packed by sequence.

    A row is one sequence, or two with true classifier-free guidance.
    """

    layout: Layout
    """Of all tokens, whether computed or not."""
    text: Tensor
    """(text_tokens, joint_dim), the text stream."""
    pooled: Tensor
    """(sequences, pooled_dim)"""
    guidance: Tensor
    """(sequences,) float32, distilled guidance scale."""
    rotary: Rotary
    """In joint order, of all tokens."""
    regions: tuple[Region | None, ...]
    """By sequence: what of its picture is computed, None for all of it."""
    _live: dict[tuple[bool, ...], Live] = field(default_factory=dict, init=False)
    _beyond: dict[tuple[int, ...], Beyond] = field(default_factory=dict, init=False)

    def live(self, whole: tuple[bool, ...]) -> Live:
        """The tokens of a block that computes all image tokens of the sequences in `whole`, the regions of others.

        A sequence without a region is whole, whatever is said. Kept while the batch stays as it is.
        """
        whole = tuple(w or region is None for w, region in zip(whole, self.regions, strict=True))
        if whole not in self._live:
            self._live[whole] = self._selected(whole)
        return self._live[whole]

    def beyond(self, of: Sequence[int]) -> Beyond:
        """The outside tokens of the sequences `of`, which have regions. Kept likewise."""
        key = tuple(of)
        if key not in self._beyond:
            self._beyond[key] = self._outside(key)
        return self._beyond[key]

    def _selected(self, whole: tuple[bool, ...]) -> Live:
        full = self.layout
        device = full.to_joint.device
        if all(whole):
            return Live(whole, full, torch.arange(sum(full.image_lengths), device=device), self.rotary)
        chosen = [
            torch.arange(length, device=device) if every or region is None else region.computed
            for length, every, region in zip(full.image_lengths, whole, self.regions, strict=True)
        ]
        starts = [start for start, _ in bounds(full.image_lengths)]
        joint = torch.cat(
            [
                torch.cat((torch.arange(start, start + text, device=device), picked + (start + text)))
                for (start, _), text, picked in zip(full.joint.bounds, full.text_lengths, chosen, strict=True)
            ]
        )
        return Live(
            whole,
            layout(full.text_lengths, [len(picked) for picked in chosen], device),
            torch.cat([picked + start for start, picked in zip(starts, chosen, strict=True)]),
            self._rotary_at(joint),
        )

    def _outside(self, of: tuple[int, ...]) -> Beyond:
        full = self.layout
        parts = []
        for sequence in of:
            region = self.regions[sequence]
            if region is None:
                raise ValueError(f"sequence {sequence} computes all of its tokens")
            parts.append(region.outside + (full.joint.bounds[sequence][0] + full.text_lengths[sequence]))
        lengths = tuple(len(part) for part in parts)
        return Beyond(
            lengths, segment_index(lengths, full.to_joint.device), self._rotary_at(torch.cat(parts))
        )

    def _rotary_at(self, joint: Tensor) -> Rotary:
        cosine, sine = self.rotary
        return cosine.index_select(0, joint), sine.index_select(0, joint)
