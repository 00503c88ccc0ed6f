"""The compute set: which tokens of a picture an edit and its blocks compute, and what blocks get beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from giornata.packed.attention import Apart, Beside
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import Layout, Segments, make_layout, to_device
from giornata.wire.values import BlockMode, CellMap

T = TypeVar("T")

# What blocks of one forward get beside their tokens: what is taken, recorded, added, and changed by LoRAs.


class KeysValues(Protocol):
    """A source of keys and values for tokens that a sequence does not compute."""

    def keys_values(self, block: int) -> Apart:
        """Keys, after norm and rotary embedding, and values, with room for the sequence's own or none."""


class KVSource(KeysValues, Protocol):
    """A source of a template run's keys and values for the tokens outside a sequence's compute set."""

    @property
    def keeps(self) -> bool:
        """Return whether it has what it answers as blocks read it: then it answers the same in every step."""

    def hidden(self, block: int) -> Tensor:
        """(outside, inner_dim): input of `block`, as its image stream."""

    def part(self, block: int, part: str) -> Tensor:
        """(outside, channels): another part of `block` that :class:`giornata.planning.operations.BlockSpec` names."""


class KeysValuesRecorder(Protocol):
    """Keeps keys and values of some tokens. It copies what it is given, which later blocks overwrite."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:
        """(tokens, heads, head_dim) each; keys after norm and rotary embedding."""


class ActivationRecorder(KeysValuesRecorder, Protocol):
    """Keeps what later edits may need. It copies what it is given, which later blocks overwrite.

    `tokens` are the tokens of the picture that the block computes: all of them, or the region's where the block takes
    the others from a template.
    """

    def hidden(self, block: int, hidden: Tensor) -> None:
        """(tokens, inner_dim): the image stream that enters `block`."""

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """(tokens, channels): another part of `block`, see :meth:`KVSource.part`."""


class Residuals(Protocol):
    """The residuals of a sequence's ControlNets behind its blocks, in one step: scaled, and summed over all of them."""

    @property
    def whole(self) -> bool:
        """Return whether samples are of all tokens of the picture; else they are of its region's, in that order."""

    def sample(self, block: int) -> Tensor | None:
        """(tokens, channels): what is added behind `block`, and may be waited for here; None for nothing.

        Of a UNet, `block` counts its skip connections, and the middle's output behind them; a token is a tile.
        """


@dataclass(frozen=True, eq=False)
class CachedTokens:
    """The tokens that a sequence takes from a template: its region is computed, all others are taken."""

    modes: tuple[BlockMode, ...]
    """The mode of every block."""
    source: KVSource


@dataclass(frozen=True, eq=False)
class BlockInputs:
    """All that one sequence uses beside its tokens, one field for each kind; any of them may come together."""

    taken: CachedTokens | None = None
    """None computes all tokens."""
    recorder: ActivationRecorder | None = None
    padding: KeysValues | None = None
    """Where its prompt's padding is found in every block, whatever the block's mode; None computes it."""
    padding_recorder: KeysValuesRecorder | None = None
    """Is shown its prompt's padding, where that is computed."""
    low_rank: SequenceLoras | None = None
    """Its LoRAs, which change what the layers make of its tokens; None for none."""
    residuals: Residuals | None = None
    """None where no ControlNet acts on it."""


def by_sequence(of_rows: Sequence[Sequence[T]]) -> tuple[T, ...]:
    """Return what sequences have, in the order of a batch: the positive ones of all rows, then the negative ones."""
    return (*[own[0] for own in of_rows], *[own[1] for own in of_rows if len(own) > 1])


# The compute set: which tokens of a picture an edit computes, and which tokens of a batch a block computes.


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
            twin = Region(to_device(self.computed, device), to_device(self.outside, device), self.digest)
            twin._twins[self.computed.device] = self  # nothing is copied back
            self._twins[device] = twin
        return self._twins[device]


def with_companions(partition: Region, companions: int) -> Region:
    """`partition` and so many tokens behind the picture's, which lie outside; itself where there are none."""
    if not companions:
        return partition
    first = len(partition.computed) + len(partition.outside)
    behind = torch.arange(first, first + companions, device=partition.outside.device)
    return Region(partition.computed, torch.cat((partition.outside, behind)), partition.digest)


def make_region(cells: Tensor) -> Region | None:
    """The region of a compute set, (height, width) bool, on the CPU; None where it holds every token or none."""
    flat = cells.cpu().flatten()
    if bool(flat.all()) or not bool(flat.any()):
        return None
    digest = hashlib.blake2b(flat.numpy().tobytes(), digest_size=16).digest()
    return Region(flat.nonzero().squeeze(1), (~flat).nonzero().squeeze(1), digest)


def unite_regions(one: Region, other: Region) -> Region | None:
    """The region that computes what either of two does, of one picture; None where that is all of it."""
    cells = torch.zeros(len(one.computed) + len(one.outside), dtype=torch.bool)
    cells[one.computed.cpu()] = True
    cells[other.computed.cpu()] = True
    return make_region(cells)


def region_of(cells: CellMap) -> Region | None:
    """:func:`region` of a compute set as an inspection carries it."""
    packed = torch.frombuffer(bytearray(cells.bits), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(7, -1, -1) & 1
    return make_region(bits.flatten()[: cells.height * cells.width].bool())


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
class ForwardPlan:
    """The plan of what the blocks of a batch compute and take: it stays while the batch and its uses do."""

    uses: tuple[BlockInputs, ...]
    """By sequence; empty where no sequence uses anything."""
    taken: dict[int, CachedTokens]
    """By sequence, as `recorders` and `residuals`."""
    recorders: dict[int, ActivationRecorder]
    residuals: dict[int, Residuals]
    entering: ComputeSet
    """What is live before the first block. One that needs the hidden state of outside tokens makes it from latents."""
    sets: tuple[ComputeSet, ...]
    """What each block computes; empty where no sequence takes anything, and every block computes all tokens."""
    hidden: tuple[tuple[int, ...], ...]
    """By block: the sequences whose outside tokens enter it as a hidden state; empty as above."""
    outside: dict[int, dict[int, Beside]] = field(default_factory=dict, init=False)
    """By block and sequence: keys and values of tokens that are not computed. A forward that has asked for them keeps
    them here, where every step finds the same."""

    @property
    def stays(self) -> bool:
        """Return whether later steps may find the plan again: nothing in it is of one step alone."""
        return not self.residuals and all(
            use.recorder is None and use.padding_recorder is None for use in self.uses
        )


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """The tokens of a batch, and which of them are computed; packed by sequence.

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
    _unpadded: dict[tuple[int, ...], tuple[PackedBatch, Tensor]] = field(default_factory=dict, init=False)
    _plans: list[ForwardPlan] = field(default_factory=list, init=False)
    """The last one, if it stays."""

    def without_padding(self, of: tuple[int, ...]) -> tuple[PackedBatch, Tensor]:
        """The batch without the padding of the sequences `of`, which have text beside it; kept with the batch.

        Also where its text lies: (text_tokens,) int64, positions in the text stream of all tokens.
        """
        if of not in self._unpadded:
            full, device = self.layout, self.layout.joint.device
            lengths = list(full.text.lengths)
            for sequence in of:
                lengths[sequence] -= self.padding[sequence]
            spans = zip(full.text.bounds, lengths, strict=True)
            kept = [torch.arange(start, start + length) for (start, _), length in spans]
            text = to_device(torch.cat(kept), device)
            made = make_layout(lengths, full.image.lengths, device, empty=True)
            joint = made.join(full.text_positions.index_select(0, text), full.image_positions)
            padding = tuple(0 if s in of else count for s, count in enumerate(self.padding))
            unpadded = PackedBatch(made, self._rotary_at(joint), self.regions, padding)
            self._unpadded[of] = unpadded, text
        return self._unpadded[of]

    def plan(self, uses: tuple[BlockInputs, ...]) -> ForwardPlan:
        """What blocks compute and take under `uses`: that of the last step where these are the same objects."""
        if self._plans and self._plans[0].uses == uses:
            return self._plans[0]
        self._plans.clear()
        plan = self._planned(uses)
        if plan.stays:
            self._plans.append(plan)
        return plan

    def live(self, whole: tuple[bool, ...]) -> ComputeSet:
        """The tokens of a block that computes all image tokens of the sequences in `whole`, the regions of others.

        A sequence without a region is always whole. The result is kept with the batch.
        """
        found = self._live.get(whole)
        if found is None:
            every = tuple(w or region is None for w, region in zip(whole, self.regions, strict=True))
            found = self._live[whole] = self._live.get(every) or self._selected(every)
            self._live[every] = found
        return found

    def beyond(self, of: tuple[int, ...]) -> CachedTokenSegments:
        """The outside tokens of the sequences `of`, which have regions; kept with the batch."""
        if of not in self._beyond:
            device = self.layout.joint.device
            tokens = torch.split(self.layout.image_positions, list(self.layout.image.lengths))
            parts = []
            for sequence in of:
                region = self.regions[sequence]
                if region is None:
                    raise ValueError(f"sequence {sequence} computes all of its tokens")
                parts.append(tokens[sequence].index_select(0, region.outside))
            segments = Segments(tuple(map(len, parts)), device)
            sequences = to_device(torch.tensor(of), device)
            self._beyond[of] = CachedTokenSegments(segments, sequences, self._rotary_at(torch.cat(parts)))
        return self._beyond[of]

    def _planned(self, uses: tuple[BlockInputs, ...]) -> ForwardPlan:
        taken = {s: use.taken for s, use in enumerate(uses) if use.taken is not None}
        whole, sets, hidden = [True] * len(self.regions), list[ComputeSet](), list[tuple[int, ...]]()
        before: tuple[BlockMode, ...] = ()
        entering = None
        for modes in zip(*(each.modes for each in taken.values()), strict=True):
            if entering is None:
                for sequence, mode in zip(taken, modes, strict=True):
                    whole[sequence] = mode is not BlockMode.KV
                entering = self.live(tuple(whole))
            if modes == before:
                sets.append(sets[-1])
                hidden.append(hidden[-1])
                continue
            for sequence, mode in zip(taken, modes, strict=True):
                whole[sequence] = mode is BlockMode.FULL
            sets.append(self.live(tuple(whole)))
            hidden.append(tuple(s for s, mode in zip(taken, modes, strict=True) if mode is BlockMode.HIDDEN))
            before = modes
        return ForwardPlan(
            uses,
            taken,
            {s: use.recorder for s, use in enumerate(uses) if use.recorder is not None},
            {s: use.residuals for s, use in enumerate(uses) if use.residuals is not None},
            self.live(tuple(whole)) if entering is None else entering,
            tuple(sets),
            tuple(hidden),
        )

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
        made = make_layout(full.text.lengths, [len(picked) for picked in chosen], device, empty=True)
        image = torch.cat(chosen)
        joint = made.join(full.text_positions, full.image_positions.index_select(0, image))
        return ComputeSet(whole, made, image, self._rotary_at(joint))

    def _rotary_at(self, joint: Tensor) -> Rotary:
        cosine, sine = self.rotary
        return cosine.index_select(0, joint), sine.index_select(0, joint)


# Which tokens the blocks of one forward compute, and what the others are where they are needed.
#
# A stream is (tokens, ...): tokens of any shape, in the order of `giornata.packed.packing`.


LAST = -1
"""No block: behind the last one."""


class ComputeSetStream:
    """The image stream's live tokens, from block to block.

    Text is live in every block. A sequence that takes something computes its region alone, but for blocks in
    `Mode.FULL`.
    """

    def __init__(self, sequences: PackedBatch, uses: Sequence[BlockInputs]) -> None:
        self._sequences, self.plan = sequences, sequences.plan(tuple(uses))
        plan = self.plan
        self.taken, self.recorders, self.residuals = plan.taken, plan.recorders, plan.residuals
        self.hidden: dict[int, Tensor] = {}
        """By sequence: the present block's input of the outside tokens, (outside, ...), where it is needed."""
        self.now = self.plan.entering

    def enter(self, block: int, image: Tensor) -> Tensor:
        """The image stream as `block` computes it, (live_tokens, ...); recorders see it."""
        if self.taken:
            self.hidden = {}
            spans = self.now.layout.image.bounds
            for sequence in self.plan.hidden[block]:
                part, region = image[slice(*spans[sequence])], self._sequences.regions[sequence]
                if region is not None and self.now.whole[sequence]:
                    self.hidden[sequence] = part.index_select(0, region.outside)
                else:
                    self.hidden[sequence] = self._kept(sequence, block, part)
            wanted = self.plan.sets[block]
            if wanted is not self.now:
                image = self._converted(image, wanted, block)
        for sequence, recorder in self.recorders.items():
            part = image[slice(*self.now.layout.image.bounds[sequence])]
            recorder.hidden(block, part.flatten(1))
        return image

    def enter_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`enter` for the joint order."""
        plan = self.plan
        if not self.recorders and not (
            self.taken and (plan.hidden[block] or plan.sets[block] is not self.now)
        ):
            self.hidden = {}
            return joint
        text, image = self.now.layout.split(joint)
        image = self.enter(block, image)
        return self.now.layout.join(text, image)

    def add(self, block: int, image: Tensor) -> Tensor:
        """The image stream behind `block`, (live_tokens, channels), with what ControlNets add to it, in place."""
        return self._added(block, image, self.now.layout.image.bounds)

    def add_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`add` for the joint order."""
        return self._added(block, joint, _pictures(self.now.layout)) if self.residuals else joint

    def leave(self, image: Tensor) -> Tensor:
        """The regions' tokens of the image stream behind the last block."""
        return self._converted(image, self._sequences.live((False,) * len(self._sequences.regions)), LAST)

    def _added(self, block: int, stream: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """`stream`, in which the live tokens of each sequence's picture lie at `spans`."""
        for sequence, residuals in self.residuals.items():
            sample, region = residuals.sample(block), self._sequences.regions[sequence]
            if sample is None:
                continue
            part = stream[slice(*spans[sequence])]
            if residuals.whole and self.now.whole[sequence]:
                part[: len(sample)].add_(sample)  # companions lie behind the picture's tokens
            elif region is None:
                raise ValueError(f"sequence {sequence} has no region, and a residual of one")
            elif residuals.whole:
                part += sample.index_select(0, region.computed)
            elif self.now.whole[sequence]:
                part.index_add_(0, region.computed, sample)
            else:
                part += sample
        return stream

    def _kept(self, sequence: int, block: int, like: Tensor) -> Tensor:
        """The outside tokens as the template had them, of the shape of the tokens `like`."""
        kept = self.taken[sequence].source.hidden(block)
        return kept.view(len(kept), *like.shape[1:])

    def _converted(self, image: Tensor, wanted: ComputeSet, block: int) -> Tensor:
        """The image stream with the tokens of `wanted`, which are live from now on.

        Tokens that join are those of the input of `block`, as the template had them.
        """
        before, self.now = self.now, wanted
        if before is wanted:
            return image
        parts = list(torch.split(image, list(before.layout.image.lengths)))
        for sequence, region in enumerate(self._sequences.regions):
            had, want = before.whole[sequence], wanted.whole[sequence]
            if region is None or had == want:
                continue
            part = parts[sequence]
            if had:
                parts[sequence] = part.index_select(0, region.computed)
            else:
                whole = part.new_empty(len(region.computed) + len(region.outside), *part.shape[1:])
                whole[region.computed] = part
                whole[region.outside] = self._kept(sequence, block, part)
                parts[sequence] = whole
        return torch.cat(parts)


def _pictures(layout: Layout) -> list[tuple[int, int]]:
    """(start, end) of each sequence's image tokens in the joint order."""
    spans = zip(layout.joint.bounds, layout.text.lengths, strict=True)
    return [(start + text, end) for (start, end), text in spans]
