"""The packed layout of a batch: where its tokens lie, which of them are computed, and what blocks get beside them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import add
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

import torch
from torch import Tensor

from giornata.wire.values import BlockMode, CellMap

if TYPE_CHECKING:
    from giornata.packed.attention import Apart, Beside
    from giornata.packed.low_rank import SequenceLoras

T = TypeVar("T")

# Tensors on their way from the host to a device.


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """`tensor` on `device`; itself where it is there.

    A copy to a GPU leaves from pinned memory, on the current stream: the host waits neither for the copy nor for what
    the stream has to do before. torch keeps the pinned memory until the copy has been made.
    """
    where = torch.device(device)
    if where.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(where, non_blocking=True)
    return tensor.to(where)


# What packed blocks tell of their time: spans on lanes. Pure.


class TraceLane(StrEnum):
    """Lines of a trace."""

    STEP = "steps"
    COMPUTE = "compute"
    WAIT = "wait"
    """Part of computing: for a load."""
    LOAD = "load"


class LaneTracer(Protocol):
    """Takes in spans, or nothing."""

    def span(self, lane: TraceLane, name: str, **arguments: object) -> AbstractContextManager[None]:
        """Return what is done within, on the current stream of the current thread."""


class NullLaneTracer:
    """Takes in nothing."""

    def span(self, lane: TraceLane, name: str, **arguments: object) -> AbstractContextManager[None]:  # noqa: ARG002 - protocol
        """Record nothing."""
        return nullcontext()


UNTRACED: Final = NullLaneTracer()


# Maps and tokens, where a token is a square tile of a map: its channels are (channel, y, x) in this order.
# Pure.


def tiles_to_maps(tiles: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens as maps: (pictures, tiles, channels, side, side) → (pictures, channels, height, width).

    `grid` is height and width of each picture in tiles.
    """
    pictures, _, channels, side, _ = tiles.shape
    rows, columns = grid
    maps = tiles.view(pictures, rows, columns, channels, side, side).permute(0, 3, 1, 4, 2, 5)
    return maps.reshape(pictures, channels, rows * side, columns * side)


def maps_to_tiles(maps: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of :func:`joined`."""
    pictures, channels, height, width = maps.shape
    rows, columns = grid
    tiles = maps.reshape(pictures, channels, rows, height // rows, columns, width // columns)
    tiles = tiles.permute(0, 2, 4, 1, 3, 5)
    return tiles.reshape(pictures, rows * columns, channels, height // rows, width // columns)


# The packed layout: token-wise work runs over all sequences at once, without padding.
#
# There are three orders of the same tokens:
#
#   text stream   text of 0 | text of 1 | ...                       (text_tokens, channels)
#   image stream  image of 0 | image of 1 | ...                     (image_tokens, channels)
#   joint order   text of 0, image of 0 | text of 1, image of 1     (text_tokens + image_tokens, channels)
#
# Projections, norms and MLPs work on any of them; attention works on the joint order, where each sequence
# is a contiguous segment.


@dataclass(frozen=True, eq=False)
class Segments:
    """Contiguous segments of a packed tensor's first dimension, one per sequence; tensors are made when asked for.

    Raises:
        ValueError: there is no segment.
    """

    lengths: tuple[int, ...]
    """In tokens; 0 where a sequence has none in this stream."""
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("a packed tensor needs at least one sequence, received none")

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest segment."""
        return max(self.lengths)

    @cached_property
    def items(self) -> tuple[int, int]:
        """The batch that modules of a static batch see: (sequences, tokens) of equally long ones, else (tokens, 1)."""
        return (len(self.lengths), self.longest) if self.even else (sum(self.lengths), 1)

    @cached_property
    def even(self) -> bool:
        """Whether all segments are equally long, and not empty."""
        return len(set(self.lengths)) == 1 and self.longest > 0

    @cached_property
    def bounds(self) -> list[tuple[int, int]]:
        """(start, end) of every segment."""
        return list(pairwise(accumulate(self.lengths, initial=0)))

    @cached_property
    def offsets(self) -> Tensor:
        """(sequences + 1,) int32: cumulative lengths, as varlen attention takes them."""
        return to_device(torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32), self.device)

    @cached_property
    def sequence(self) -> Tensor:
        """(tokens,) int64: the sequence that each token belongs to."""
        return to_device(torch.repeat_interleave(torch.tensor(self.lengths)), self.device)


@dataclass(frozen=True, eq=False)
class Layout:
    """The places of several sequences' tokens in the three orders; indices are int64, on its device."""

    text: Segments
    image: Segments
    joint: Segments
    """Text then image of each sequence."""
    text_positions: Tensor
    """(text_tokens,) gathers the text stream from the joint order."""
    image_positions: Tensor
    """(image_tokens,) gathers the image stream from the joint order."""

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """The joint order of two streams: (text_tokens, ...), (image_tokens, ...) → (joint_tokens, ...)."""
        if len(self.joint.lengths) == 1:
            return torch.cat((text, image))
        texts, images = (text.split_with_sizes(self.text.lengths), image.split_with_sizes(self.image.lengths))
        return torch.cat(list(chain.from_iterable(zip(texts, images, strict=True))))

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """Text and image stream of a joint tensor; the inverse of :meth:`join`. Views, where there is one sequence."""
        if len(self.joint.lengths) == 1:
            text, image = joint.split_with_sizes((*self.text.lengths, *self.image.lengths))
            return text, image
        return joint.index_select(0, self.text_positions), joint.index_select(0, self.image_positions)


def make_layout(
    text_lengths: Sequence[int],
    image_lengths: Sequence[int],
    device: torch.device | str = "cpu",
    *,
    empty: bool = False,
) -> Layout:
    """The layout of sequences with the given numbers of text and image tokens.

    A sequence may have no text. One of which a process has a share alone may be `empty` there.

    Raises:
        ValueError: the two differ in length, or a sequence has no image token and must not be empty.
    """
    if len(text_lengths) != len(image_lengths):
        raise ValueError(f"received {len(text_lengths)} text lengths and {len(image_lengths)} image lengths")
    if 0 in image_lengths and not empty:
        raise ValueError(f"every sequence needs at least one image token, received {list(image_lengths)}")
    text, image = Segments(tuple(text_lengths), device), Segments(tuple(image_lengths), device)
    joint = Segments(tuple(map(add, text.lengths, image.lengths)), device)
    parts = torch.split(torch.arange(sum(joint.lengths)), _interleaved(text, image))
    return Layout(
        text,
        image,
        joint,
        text_positions=to_device(torch.cat(parts[::2]), device),
        image_positions=to_device(torch.cat(parts[1::2]), device),
    )


def _interleaved(texts: Segments, images: Segments) -> list[int]:
    """Lengths in the joint order: text of 0, image of 0, text of 1 and so on."""
    return list(chain.from_iterable(zip(texts.lengths, images.lengths, strict=True)))


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
"""Cosine and sine, (tokens, head_dim) float32 each, equal for both channels of a pair."""


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
