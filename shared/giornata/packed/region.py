"""The compute set: which tokens of a picture an edit computes, and which tokens of a batch a block computes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor

from giornata.packed.moving import moved
from giornata.packed.packing import Layout, Segments, layout
from giornata.wire.values import CellMap

Rotary = tuple[Tensor, Tensor]
"""Cosine and sine, (tokens, head_dim) float32 each."""


@dataclass(frozen=True, eq=False)
class Region:
    """A partition of a picture's tokens, and of what lies behind them. Indices are int64, ascending, row-major."""

    computed: Tensor
    """(computed,): the compute set; at least one, but for a share of a picture."""
    outside: Tensor
    """(outside,): all others; as above."""
    digest: bytes
    """Equal for equal partitions: rows that share one share what they take from a recording."""
    _twins: dict[torch.device, Region] = field(default_factory=dict, init=False, repr=False)

    def on(self, device: torch.device) -> Region:
        """The same region with its indices on `device`; copied there once."""
        if self.computed.device == device:
            return self
        if device not in self._twins:
            twin = Region(moved(self.computed, device), moved(self.outside, device), self.digest)
            twin._twins[self.computed.device] = self  # nothing is copied back
            self._twins[device] = twin
        return self._twins[device]


def beside(partition: Region, companions: int) -> Region:
    """`partition` and so many tokens behind the picture's, which lie outside; itself where there are none."""
    if not companions:
        return partition
    first = len(partition.computed) + len(partition.outside)
    behind = torch.arange(first, first + companions, device=partition.outside.device)
    return Region(partition.computed, torch.cat((partition.outside, behind)), partition.digest)


def region(cells: Tensor) -> Region | None:
    """The region of a compute set, (height, width) bool, on the CPU; None where it holds every token or none."""
    flat = cells.cpu().flatten()
    if bool(flat.all()) or not bool(flat.any()):
        return None
    digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()
    return Region(flat.nonzero().squeeze(1), (~flat).nonzero().squeeze(1), digest)


def united(one: Region, other: Region) -> Region | None:
    """The region that computes what either of two does, of one picture; None where that is all of it."""
    cells = torch.zeros(len(one.computed) + len(one.outside), dtype=torch.bool)
    cells[one.computed.cpu()] = True
    cells[other.computed.cpu()] = True
    return region(cells)


def region_of(cells: CellMap) -> Region | None:
    """:func:`region` of a compute set as an inspection carries it."""
    packed = torch.frombuffer(bytearray(cells.bits), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(7, -1, -1) & 1
    return region(bits.flatten()[: cells.height * cells.width].bool())


@dataclass(frozen=True, eq=False)
class ComputeSet:
    """The tokens that a block computes: all text tokens and, of each sequence, all image tokens or its region's."""

    whole: tuple[bool, ...]
    """Whether all image tokens are computed, by sequence."""
    layout: Layout
    image: Tensor
    """(live_image_tokens,) int64: their positions in the image stream of all tokens."""
    rotary: Rotary
    """In the joint order of `layout`."""


@dataclass(frozen=True, eq=False)
class CachedTokenSegments:
    """The outside tokens of some sequences, packed by sequence."""

    segments: Segments
    """One of each of these sequences."""
    sequences: Tensor
    """(sequences,) int64: which they are."""
    rotary: Rotary


@dataclass(frozen=True, eq=False)
class UnpaddedBatch:
    """A batch of which some prompts' padding is not computed."""

    sequences: PackedBatch
    text: Tensor
    """(text_tokens,) int64: the positions of its text stream in that of all tokens."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Where the tokens of a batch lie, and which of them are computed; packed by sequence.

    A row is one sequence, or two with true classifier-free guidance.
    """

    layout: Layout
    """Layout of all tokens, computed or not."""
    rotary: Rotary
    """Rotary embedding of all tokens, in joint order."""
    regions: tuple[Region | None, ...]
    """The part of each picture that is computed, by sequence; None for all of it. On the layout's device."""
    padding: tuple[int, ...] = ()
    """How many of each sequence's text tokens, the last ones, are padding of its prompt; empty for none of any."""
    _live: dict[tuple[bool, ...], ComputeSet] = field(default_factory=dict, init=False)
    _beyond: dict[tuple[int, ...], CachedTokenSegments] = field(default_factory=dict, init=False)
    _unpadded: dict[tuple[int, ...], UnpaddedBatch] = field(default_factory=dict, init=False)

    def without_padding(self, of: tuple[int, ...]) -> UnpaddedBatch:
        """The batch without the padding of the sequences `of`, which have text beside it; kept with the batch."""
        if of not in self._unpadded:
            self._unpadded[of] = self._without_padding(of)
        return self._unpadded[of]

    def live(self, whole: tuple[bool, ...]) -> ComputeSet:
        """The tokens of a block that computes all image tokens of the sequences in `whole`, the regions of others.

        A sequence without a region is always whole. The result is kept with the batch.
        """
        whole = tuple(w or region is None for w, region in zip(whole, self.regions, strict=True))
        if whole not in self._live:
            self._live[whole] = self._selected(whole)
        return self._live[whole]

    def beyond(self, of: tuple[int, ...]) -> CachedTokenSegments:
        """The outside tokens of the sequences `of`, which have regions; kept with the batch."""
        if of not in self._beyond:
            self._beyond[of] = self._outside(of)
        return self._beyond[of]

    def _without_padding(self, of: tuple[int, ...]) -> UnpaddedBatch:
        full = self.layout
        device = full.joint.device
        lengths = list(full.text.lengths)
        for sequence in of:
            lengths[sequence] -= self.padding[sequence]
        kept = [
            torch.arange(start, start + length)
            for (start, _), length in zip(full.text.bounds, lengths, strict=True)
        ]
        text = moved(torch.cat(kept), device)
        made = layout(lengths, full.image.lengths, device, empty=True)
        joint = made.join(full.text_positions.index_select(0, text), full.image_positions)
        return UnpaddedBatch(PackedBatch(made, self._rotary_at(joint), self.regions), text)

    def _selected(self, whole: tuple[bool, ...]) -> ComputeSet:
        full = self.layout
        device = full.joint.device
        if all(whole):
            return ComputeSet(whole, full, torch.arange(sum(full.image.lengths), device=device), self.rotary)
        tokens = torch.split(torch.arange(sum(full.image.lengths), device=device), list(full.image.lengths))
        chosen = [
            part if every or region is None else part.index_select(0, region.computed)
            for part, every, region in zip(tokens, whole, self.regions, strict=True)
        ]
        made = layout(full.text.lengths, [len(picked) for picked in chosen], device, empty=True)
        image = torch.cat(chosen)
        joint = made.join(full.text_positions, full.image_positions.index_select(0, image))
        return ComputeSet(whole, made, image, self._rotary_at(joint))

    def _outside(self, of: tuple[int, ...]) -> CachedTokenSegments:
        full = self.layout
        tokens = torch.split(full.image_positions, list(full.image.lengths))
        parts = []
        for sequence in of:
            region = self.regions[sequence]
            if region is None:
                raise ValueError(f"sequence {sequence} computes all of its tokens")
            parts.append(tokens[sequence].index_select(0, region.outside))
        lengths = tuple(len(part) for part in parts)
        device = full.joint.device
        return CachedTokenSegments(
            Segments(lengths, device), moved(torch.tensor(of), device), self._rotary_at(torch.cat(parts))
        )

    def _rotary_at(self, joint: Tensor) -> Rotary:
        cosine, sine = self.rotary
        return cosine.index_select(0, joint), sine.index_select(0, joint)
