"""The state of one driven forward: which tokens are live, their modulation, and what they attend to outside.

A plan of a step is a prefix: blocks in full, then blocks that take keys and values. A block's input is not kept, so the
outside tokens do not come back within a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from giornata.packed.attention import Attention, Outside
from giornata.packed.packing import Segments
from giornata.packed.pages import Pages
from giornata.packed.region import Live, Region, Rotary, Sequences
from giornata.packed.uses import Use
from giornata.wire.values import Mode


class Stream(Enum):
    """Tokens that a module sees, packed by sequence."""

    TEXT = auto()
    IMAGE = auto()
    """The picture's live tokens, and live companions of the picture behind each sequence's."""
    JOINT = auto()
    """Text and image of each sequence."""
    OUTPUT = auto()
    """The tokens that the network answers for: those of the regions, without companions."""


class Site(NamedTuple):
    """A place where tokens meet: one attention of a block."""

    block: int
    nth: int = 0
    sites: int = 1
    """Attentions of the block: a recording keeps their heads side by side."""


class Forward:
    """One forward over `sequences`.

    `vectors` are (sequences, width): the modulation of each sequence's step. `uses` are by sequence, and empty where no
    sequence uses anything. `output` are the segments of :attr:`Stream.OUTPUT`.

    Raises:
        ValueError: a plan is no prefix.
    """

    def __init__(
        self, sequences: Sequences, vectors: Tensor, uses: Sequence[Use], attend: Attention, output: Segments
    ) -> None:
        self._sequences, self._vectors, self._attend, self._output = sequences, vectors, attend, output
        self._taken = {s: use.taken for s, use in enumerate(uses) if use.taken is not None}
        self._recorders = {s: use.recorder for s, use in enumerate(uses) if use.recorder is not None}
        self._fulls = {s: _full_blocks(taken.modes) for s, taken in self._taken.items()}
        self._shown: dict[int, list[tuple[Tensor, Tensor]]] = {}
        """By sequence: keys and values of the present block's sites so far."""
        self._kept: dict[int, Outside | Pages] = {}
        """By sequence: what the present block takes, of all of its sites."""
        self.live = self._live_in(0)

    def entering(self, block: int, image: Tensor) -> Tensor:
        """The image stream as `block` computes it, (live_tokens, 1, channels); other tokens leave."""
        before, self.live = self.live, self._live_in(block)
        return image if before is self.live else _narrowed(image, before, self.live, self._sequences.regions)

    def entering_joint(self, block: int, joint: Tensor) -> Tensor:
        """:meth:`entering` for the joint order."""
        before = self.live
        if self._live_in(block) is before:
            return joint
        text, image = before.layout.split(joint)
        image = self.entering(block, image)
        return self.live.layout.join(text, image)

    def leaving(self, image: Tensor) -> Tensor:
        """The image stream behind the last block, of the regions' tokens alone."""
        before, self.live = self.live, self._sequences.live((False,) * len(self._sequences.regions))
        return image if before is self.live else _narrowed(image, before, self.live, self._sequences.regions)

    def vectors(self, start: int, width: int, stream: Stream) -> Tensor:
        """A slice of the modulation, (tokens of `stream`, width), or (1, width) where there is one sequence."""
        part = self._vectors[:, start : start + width]
        return part if len(part) == 1 else part.index_select(0, self.segments(stream).sequence)

    def segments(self, stream: Stream) -> Segments:
        """The tokens of each sequence in a stream."""
        layout = self.live.layout
        return {
            Stream.TEXT: layout.text,
            Stream.IMAGE: layout.image,
            Stream.JOINT: layout.joint,
            Stream.OUTPUT: self._output,
        }[stream]

    def rotary(self, stream: Stream) -> Rotary | None:
        """Cosine and sine of the live tokens of a stream; None where positions turn nothing."""
        cosine, sine = self.live.rotary
        if not cosine.shape[1]:
            return None
        if stream is Stream.JOINT:
            return cosine, sine
        return self.live.layout.split(cosine)[1], self.live.layout.split(sine)[1]

    def attended(self, site: Site, stream: Stream, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each sequence over its own keys and those outside: (tokens, heads, head_dim) each → (tokens, 1, channels).

        `stream` is the joint order, or the image stream where no text is attended to.
        """
        segments = self.segments(stream)
        if self._recorders:
            self._show(site, stream, key, value)
        outside = self._outside(site, segments, key)
        return self._attend(query, key, value, segments, outside).flatten(1).unsqueeze(1)

    def _live_in(self, block: int) -> Live:
        count = len(self._sequences.regions)
        return self._sequences.live(
            tuple(s not in self._fulls or block < self._fulls[s] for s in range(count))
        )

    def _show(self, site: Site, stream: Stream, key: Tensor, value: Tensor) -> None:
        """Show the recorders keys and values of the image tokens, those of all sites of a block together."""
        text = (
            self.live.layout.text.lengths if stream is Stream.JOINT else (0,) * len(self._sequences.regions)
        )
        bounds = self.segments(stream).bounds
        for sequence, recorder in self._recorders.items():
            start, end = bounds[sequence]
            picture = slice(start + text[sequence], end)
            shown = self._shown.setdefault(sequence, [])
            shown.append((key[picture], value[picture]))
            if len(shown) == site.sites:
                keys, values = zip(*self._shown.pop(sequence), strict=True)
                recorder.keys_values(site.block, _side_by_side(keys), _side_by_side(values))

    def _outside(self, site: Site, own: Segments, key: Tensor) -> Mapping[int, Outside | Pages]:
        """What each sequence takes of a site's block; `own` are the tokens that attend, and `key` is theirs."""
        found: dict[int, Outside | Pages] = {}
        for sequence, taken in self._taken.items():
            if site.block >= self._fulls[sequence]:
                if site.nth == 0:
                    kept = taken.source.keys_values(site.block)
                    self._kept[sequence] = _by_head(kept, site.sites, key) if site.sites > 1 else kept
                found[sequence] = _fitted(_of_site(self._kept[sequence], site), own.lengths[sequence])
        return found


@lru_cache(maxsize=1024)
def _full_blocks(modes: tuple[Mode, ...]) -> int:
    """How many blocks a plan computes in full before it takes keys and values."""
    full = next((block for block, mode in enumerate(modes) if mode is not Mode.FULL), len(modes))
    if any(mode is not Mode.KV for mode in modes[full:]):
        raise ValueError(
            f"a driven transformer computes blocks in full and then takes keys and values, received {list(modes)}"
        )
    return full


def _narrowed(image: Tensor, before: Live, wanted: Live, regions: Sequence[Region | None]) -> Tensor:
    """The image stream without the tokens that are live `before` and not `wanted`."""
    parts = list(torch.split(image, list(before.layout.image.lengths)))
    for sequence, region in enumerate(regions):
        if region is not None and before.whole[sequence] and not wanted.whole[sequence]:
            parts[sequence] = parts[sequence].index_select(0, region.computed)
    return torch.cat(parts)


def _side_by_side(sites: Sequence[Tensor]) -> Tensor:
    """(tokens, heads, head_dim) of each site → (tokens, heads of all sites, head_dim)."""
    return sites[0] if len(sites) == 1 else torch.cat(list(sites), dim=1)


def _by_head(kept: Outside | Pages, sites: int, key: Tensor) -> Outside:
    """What is taken of all sites of a block; `key` is what one of them projects, (tokens, heads, head_dim)."""
    if isinstance(kept, Outside):
        return kept
    shape = len(kept), sites * key.shape[1], key.shape[2]
    of_key, of_value = (rows.to(key.dtype).view(shape) for rows in kept.rows())
    return Outside(of_key, of_value)


def _of_site(kept: Outside | Pages, site: Site) -> Outside | Pages:
    """The heads of one site; stored pages are those of a block with one."""
    if isinstance(kept, Pages) or site.sites == 1:
        return kept
    key, value = (part.chunk(site.sites, dim=1)[site.nth] for part in (kept.key, kept.value))
    return Outside(key, value, kept.room)


def _fitted(outside: Outside | Pages, own: int) -> Outside | Pages:
    """`outside` with room for `own` tokens, or none: an attention without text needs less."""
    if isinstance(outside, Pages) or outside.room in (0, own):
        return outside
    spare = outside.room - own
    return Outside(outside.key[spare:], outside.value[spare:], own)
