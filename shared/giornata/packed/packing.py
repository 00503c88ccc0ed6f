"""The packed layout: token-wise work runs over all sequences at once, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate, chain, pairwise
from operator import add
from typing import Final, Protocol

import torch
from torch import Tensor

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
# Three orders of the same tokens, `s` counting sequences::
#
# text stream text of 0 | text of 1 | ... (text_tokens, channels) image stream image of 0 | image of 1 | ...
# (image_tokens, channels) joint order text of 0, image of 0 | text of 1, image of 1 (text_tokens +
# image_tokens, channels)
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
