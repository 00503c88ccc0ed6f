"""The packed layout: token-wise work runs over all sequences at once, without padding.

Three orders of the same tokens, `s` counting sequences::

    text stream    text of 0 | text of 1 | ...                     (text_tokens, channels)
    image stream   image of 0 | image of 1 | ...                   (image_tokens, channels)
    joint order    text of 0, image of 0 | text of 1, image of 1   (text_tokens + image_tokens, channels)

Projections, norms and MLPs work on any of them; attention works on the joint order, where each sequence is a
contiguous segment. Pure: tensors only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Segments:
    """Contiguous segments of a packed tensor's first dimension, one per sequence."""

    lengths: tuple[int, ...]
    offsets: Tensor
    """(sequences + 1,) int32 on the engine's device: cumulative lengths, as varlen attention takes them."""

    @property
    def longest(self) -> int:
        """Length of the longest segment."""
        return max(self.lengths)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(start, end) of every segment."""
        return bounds(self.lengths)


def bounds(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(start, end) of contiguous segments of the given `lengths`."""
    return list(pairwise(accumulate(lengths, initial=0)))


def segments(lengths: Sequence[int], device: torch.device | str = "cpu") -> Segments:
    """Segments of the given `lengths`, in tokens, each at least 1."""
    if not lengths or min(lengths) < 1:
        raise ValueError(f"every sequence needs at least one token, received lengths {list(lengths)}")
    offsets = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32)
    return Segments(tuple(lengths), offsets.to(device))


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the tokens of several sequences lie in the three orders; indices are int64, on its device."""

    text_lengths: tuple[int, ...]
    image_lengths: tuple[int, ...]
    joint: Segments
    """Segments of the joint order: text then image of each sequence."""
    text_sequence: Tensor
    """(text_tokens,) sequence of each token of the text stream."""
    image_sequence: Tensor
    """(image_tokens,) sequence of each token of the image stream."""
    joint_sequence: Tensor
    """(joint_tokens,) sequence of each token of the joint order."""
    to_joint: Tensor
    """(joint_tokens,) gathers the joint order from cat(text stream, image stream)."""
    text_positions: Tensor
    """(text_tokens,) gathers the text stream from the joint order."""
    image_positions: Tensor
    """(image_tokens,) gathers the image stream from the joint order."""

    @property
    def sequences(self) -> int:
        """How many sequences are packed."""
        return len(self.joint.lengths)

    def join(self, text: Tensor, image: Tensor) -> Tensor:
        """The joint order of two streams: (text_tokens, ...), (image_tokens, ...) → (joint_tokens, ...)."""
        texts = torch.split(text, list(self.text_lengths))
        images = torch.split(image, list(self.image_lengths))
        return torch.cat([part for pair in zip(texts, images, strict=True) for part in pair])

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor]:
        """Text and image stream of a joint tensor; the inverse of :meth:`join`. Views, where there is one sequence."""
        if self.sequences == 1:
            text, image = torch.split(joint, [self.text_lengths[0], self.image_lengths[0]])
            return text, image
        return joint.index_select(0, self.text_positions), joint.index_select(0, self.image_positions)


def layout(
    text_lengths: Sequence[int], image_lengths: Sequence[int], device: torch.device | str = "cpu"
) -> Layout:
    """The layout of sequences with the given numbers of text and image tokens.

    Raises:
        ValueError: the two differ in length.
    """
    if len(text_lengths) != len(image_lengths):
        raise ValueError(f"received {len(text_lengths)} text lengths and {len(image_lengths)} image lengths")
    text, image = segments(text_lengths), segments(image_lengths)
    text_tokens = sum(text.lengths)
    to_joint = torch.cat(
        [
            torch.arange(start, end)
            for (text_start, text_end), (image_start, image_end) in zip(
                text.bounds, image.bounds, strict=True
            )
            for start, end in ((text_start, text_end), (text_tokens + image_start, text_tokens + image_end))
        ]
    )
    from_joint = torch.empty_like(to_joint)
    from_joint[to_joint] = torch.arange(len(to_joint))
    joint = segments([t + i for t, i in zip(text.lengths, image.lengths, strict=True)], device)
    return Layout(
        text_lengths=text.lengths,
        image_lengths=image.lengths,
        joint=joint,
        text_sequence=segment_index(text.lengths, device),
        image_sequence=segment_index(image.lengths, device),
        joint_sequence=segment_index(joint.lengths, device),
        to_joint=to_joint.to(device),
        text_positions=from_joint[:text_tokens].to(device),
        image_positions=from_joint[text_tokens:].to(device),
    )


def segment_index(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """(tokens,) int64: which segment each token belongs to."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)
