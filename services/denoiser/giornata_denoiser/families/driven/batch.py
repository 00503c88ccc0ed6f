"""A batch of a driven transformer: what it sees in every step, kept while the rows stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from giornata.packed.attention import Attention, Beside, DenseKV
from giornata.packed.block_inputs import BlockInputs
from giornata.packed.compute_set import ComputeSet, PackedBatch, Rotary
from giornata.packed.packing import Segments, make_layout, to_device
from giornata.packed.sharding import RankTokenOrder, Shard, ShardedBatch, Ulysses
from giornata_denoiser.families.driven.forward import ForwardContext, Prefilled
from giornata_denoiser.families.driven.prompts import DrivenPrompt
from giornata_denoiser.families.protocol import Grid, SequenceInputs

# The prefix of a block-causal sequence: tokens that attend among themselves alone, computed once for all
# steps.
#
# Text of Qwen-Image 2.1 and references of Flux.2 Klein-KV are modulated as at timestep 0 and never see the
# picture that is denoised, so that no step changes them. Their keys and values are made when a row joins.


@dataclass(frozen=True, eq=False)
class Prefix:
    """The part of one sequence that blocks compute before its first step, as an image stream without text."""

    stream: Tensor
    """(tokens, channels): what enters the first block."""
    rotary: Rotary
    """Rotary embedding of the tokens."""
    attend: Attention
    """How they attend to each other."""

    def forward(self, vectors: Tensor, kept: PrefixKeysValues) -> ForwardContext:
        """The forward that has the blocks fill `kept`; `vectors`, (1, width), are the modulation of timestep 0."""
        tokens = len(self.stream)
        sequences = PackedBatch(make_layout([0], [tokens], self.stream.device), self.rotary, (None,))
        return ForwardContext(
            sequences, vectors, (BlockInputs(recorder=kept),), self.attend, sequences.layout.image
        )


class PrefixKeysValues:
    """Keeps what the blocks show of a prefix; a :class:`giornata.packed.block_inputs.ActivationRecorder`."""

    def __init__(self) -> None:
        self._kept: list[DenseKV] = []

    @property
    def prefilled(self) -> Prefilled:
        """By block, in the order in which they ran."""
        return tuple(self._kept)

    def hidden(self, block: int, hidden: Tensor) -> None:
        """Nothing is kept of a block's input."""

    def keys_values(self, block: int, key: Tensor, value: Tensor) -> None:  # noqa: ARG002 - they come in order
        """(tokens, heads, head_dim) each; copied, since they may be views of more."""
        self._kept.append(DenseKV(key.clone(), value.clone()))

    def part(self, block: int, part: str, kept: Tensor) -> None:
        """No other part is kept."""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own: Segments,  # noqa: ARG001 - see `Attention`; a prefix is one sequence
    outside: Mapping[int, Beside],  # noqa: ARG001 - likewise: nothing lies outside of it
) -> Tensor:
    """Attention of one sequence's tokens to themselves and those before them; see `giornata.packed.attention`."""
    query, key, value = (each.unsqueeze(0).transpose(1, 2) for each in (query, key, value))
    attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return attended.transpose(1, 2)[0]


def empty_text(stream: Tensor) -> Tensor:
    """(0, channels): no text beside the image stream (tokens, channels)."""
    return torch.empty(0, stream.shape[1], dtype=stream.dtype, device=stream.device)


# A batch of a driven transformer: what it sees in every step, kept while the rows stay.


class PreparedSequence(NamedTuple):
    """The tensors of a sequence that are computed once, when its row joins."""

    vectors: Tensor
    """(steps, width): the modulation of every step."""
    text: Tensor
    """(text_tokens, channels): the text stream that enters the first block."""
    prefix: Prefilled = ()
    clean: Tensor | None = None
    """(1, width): the modulation of timestep 0, where companions see that."""


class TokenPositions(Protocol):
    """The positions of a family's tokens."""

    def rotary(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """The rotary embedding of a sequence: text, picture, companions."""

    def positions(self, grid: Grid) -> Tensor | None:
        """(cells, channels): what is added to a picture's tokens."""


@dataclass(frozen=True, eq=False)
class DrivenBatch:
    """The inputs of every step of a batch besides latents and times."""

    sequences: PackedBatch
    prepared: tuple[PreparedSequence, ...]
    text: Tensor
    """(text_tokens, channels)"""
    latent_rows: Tensor
    """(image_tokens,) int64: the row of the latents of each token of the image stream; -1 for a companion."""
    positions: Tensor | None
    """(cells, channels): what is added to the pictures' tokens; None for nothing."""
    companions: tuple[int, ...]
    """How many companions each sequence has."""
    output: Segments
    """The tokens that are answered for."""
    shared: ShardedBatch | None = None
    """What this process has of a batch that several compute: of it alone all other fields tell. None for all of it."""
    answered: RankTokenOrder | None = None
    """The tokens of all processes that are answered for."""
    of_companions: tuple[Tensor, ...] = ()
    """Which of all companions of each sequence these are, (companions,) int64; empty where it has all of them."""
    all_companions: tuple[int, ...] = ()
    """How many companions each sequence has, whoever computes them; empty where this process has all."""
    _rows: dict[tuple[bool, ...], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    def rows(self, live: ComputeSet) -> tuple[Tensor, Tensor]:
        """The pictures' live tokens, int64 each: rows of the latents, and places in the image stream."""
        if live.whole not in self._rows:  # counted on the host, which waits for no device
            tokens = zip(live.layout.image.bounds, self.companions, live.whole, strict=True)
            own = [torch.arange(start, end - count * whole) for (start, end), count, whole in tokens]
            places = to_device(torch.cat(own), live.image.device)
            self._rows[live.whole] = self.latent_rows[live.image[places]], places
        return self._rows[live.whole]


def assemble_batch(
    sequences: Sequence[SequenceInputs], at: TokenPositions, device: torch.device
) -> DrivenBatch:
    """The batch of `sequences`. A region tells of the picture's tokens and its companions, which lie outside."""
    prompts = [cast("DrivenPrompt", sequence.prompt) for sequence in sequences]
    text = [prompt.joint_tokens for prompt in prompts]
    cells = [sequence.grid[0] * sequence.grid[1] for sequence in sequences]
    companions = [sequence.companions for sequence in sequences]
    image = [sum(both) for both in zip(cells, companions, strict=True)]
    rotary = [  # a prefix lies first, companions last
        tuple(
            part[prompt.prefix_tokens :][: prompt.joint_tokens + own]
            for part in at.rotary(prompt.prefix_tokens + prompt.joint_tokens, sequence.grid, sequence.beside)
        )
        for prompt, own, sequence in zip(prompts, image, sequences, strict=True)
    ]
    latent_rows = [
        functional.pad(picture, (0, count), value=-1)
        for picture, count in zip(torch.split(torch.arange(sum(cells)), cells), companions, strict=True)
    ]
    prepared = tuple(cast("PreparedSequence", sequence.prepared) for sequence in sequences)
    regions = tuple(sequence.region for sequence in sequences)
    output = (
        count if region is None else len(region.computed)
        for count, region in zip(cells, regions, strict=True)
    )
    cosine, sine = (torch.cat(part) for part in zip(*rotary, strict=True))
    return DrivenBatch(
        PackedBatch(make_layout(text, image, device), (cosine, sine), regions),
        prepared,
        torch.cat([each.text for each in prepared]),
        to_device(torch.cat(latent_rows), device),
        _packed([at.positions(sequence.grid) for sequence in sequences]),
        tuple(companions),
        Segments(tuple(output), device),
    )


def share_batch(batch: DrivenBatch, ulysses: Ulysses) -> DrivenBatch:
    """Return what this process has of a batch that a group computes."""
    part = ulysses.part(batch.sequences)
    own, regions = part.own, batch.sequences.regions
    cells = [
        length - count
        for length, count in zip(batch.sequences.layout.image.lengths, batch.companions, strict=True)
    ]
    of_companions = [
        picture.places[picture.places >= first] - first
        for picture, first in zip(own.pictures, cells, strict=True)
    ]
    output = tuple(
        len(picture.places) - len(behind) if picture.region is None else len(picture.region.computed)
        for picture, behind in zip(own.pictures, of_companions, strict=True)
    )
    device = batch.text.device
    return replace(
        batch,
        sequences=own.sequences,
        prepared=tuple(each._replace(prefix=_by_head(each.prefix, ulysses.share)) for each in batch.prepared),
        text=batch.text.index_select(0, own.text),
        latent_rows=batch.latent_rows.index_select(0, own.image),
        companions=tuple(map(len, of_companions)),
        output=Segments(output, device),
        shared=part,
        answered=part.shares.answered(tuple(region is None for region in regions), batch.companions),
        all_companions=batch.companions,
        of_companions=tuple(to_device(behind, device) for behind in of_companions),
    )


def _by_head(prefix: Prefilled, own: Shard) -> Prefilled:
    """Keys and values of the heads of this process."""
    spans = [own.heads(each.key.shape[1]) for each in prefix]
    return tuple(
        DenseKV(each.key[:, span], each.value[:, span]) for each, span in zip(prefix, spans, strict=True)
    )


def _packed(parts: Sequence[Tensor | None]) -> Tensor | None:
    """All parts one behind the other; None where there are none."""
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None
