"""The protocol of a model family towards the engine: text, references, schedule and network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn

from giornata.packed.block_inputs import BlockInputs
from giornata.packed.compute_set import Region
from giornata.packed.low_rank import SequenceLoras
from giornata.packed.packing import UNTRACED, LaneTracer
from giornata.packed.sharding import AllToAllGroup, Shard
from giornata.planning.operations import NetworkOperations, each_block
from giornata.wire.models import BlockSpec, Sampler
from giornata_denoiser.rows.row import Prompt, SamplerTable

# Classifier-free guidance of outputs. Pure.
#
# Source: "Classifier-Free Diffusion Guidance", Ho and Salimans 2022, as diffusers' pipelines compute it.


def guide(positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """negative + scale * (positive - negative).

    `positive` and `negative` are outputs with the prompt and with the negative prompt, (tokens, channels) each; `scale`
    is (tokens, 1) float32, and the result has the outputs' dtype.
    """
    return guide_beyond(negative, positive, negative, scale)


def guide_beyond(start: Tensor, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """start + scale * (positive - negative), for pipelines that count from another output than the negative one."""
    return start + (scale * (positive - negative).float()).to(positive.dtype)


# Clean pictures whose tokens stand behind a row's: the picture that it edits, and the request's references.
# Pure.


Grid = tuple[int, int]
"""Height and width of a picture in tokens."""
REFERENCES = "references"
"""Name in a row's conditioning of its references' tokens, (tokens, channels), one picture behind the other."""


@dataclass(frozen=True)
class ReferencePolicy:
    """The choice of clean pictures that a family's network looks at."""

    own: bool = True
    """Whether the picture that is edited is one of them, the first."""
    replaced: bool = False
    """Whether the request's references stand in its place."""

    def grids(self, grid: Grid, given: Sequence[Grid], *, generated: bool = False) -> tuple[Grid, ...]:
        """Grids looked at: `grid` unless left out, then `given` in order; a generation has those alone."""
        alone = generated or not self.own or (self.replaced and bool(given))
        return (*(() if alone else (grid,)), *given)

    def tokens(self, conditioning: Mapping[str, Tensor]) -> Tensor | None:
        """(tokens, channels) of the pictures of :meth:`grids`; None without any."""
        own, given = conditioning.get("image_latents"), conditioning.get(REFERENCES)
        if own is None or not self.own or (self.replaced and given is not None):
            own = None
        parts = [part for part in (own, given) if part is not None]
        return torch.cat(parts) if parts else None


NONE = ReferencePolicy(own=False)
"""For families that look at no other picture."""


def reference_tokens(grids: Sequence[Grid]) -> int:
    """Tokens of pictures."""
    return sum(height * width for height, width in grids)


# What the engine asks of a model family: text, schedule and network.


class PromptBuilder(Protocol):
    """A builder of the tensors of a prompt."""

    @property
    def tensors(self) -> Mapping[str, tuple[int | None, ...]]:
        """Name and shape of an encoding's tensors; None is the number of text tokens."""

    def prompt(self, tensors: Mapping[str, Tensor], grid: tuple[int, int], guidance_scale: float) -> Prompt:
        """The prompt of one sequence, from :attr:`tensors` in the network's dtype and on their device.

        Among them may be :data:`giornata.tensors.PROMPT_MASK`, which tells a prompt's padding.
        `grid` is height and width of the row's picture in tokens; `guidance_scale` is for networks that embed one.
        """


class NoiseSchedule(Protocol):
    """A table of the noise levels of each sampler that a model offers, made of diffusers' own scheduler."""

    @property
    def samplers(self) -> Sequence[Sampler]:
        """Return what rows may ask for."""

    @property
    def default_sampler(self) -> Sampler:
        """The checkpoint's own."""

    @property
    def recorder(self) -> Sampler:
        """That of template runs: it evaluates the network once a level and draws no noise."""

    def track(self, *, sampler: Sampler, steps: int, strength: float, cells: int) -> SamplerTable:
        """The track of a row whose picture has `cells` tokens; 0 < `strength` <= 1 drops the first of `steps`.

        Equal arguments may give one and the same track.

        Raises:
            InvalidField: the sampler is not offered or does not take so many steps, or strength leaves none to compute.
        """


class SequenceInputs(NamedTuple):
    """The inputs of one sequence of a batch, all of them on the network's device."""

    prompt: Prompt
    grid: tuple[int, int]
    """Height and width of its picture in tokens."""
    region: Region | None
    """What of the picture is computed, companions being outside; None for all of it."""
    companions: int
    """How many companions its row has; see :meth:`Network.companions`."""
    prepared: object
    """What :meth:`Network.prepare` made of the prompt."""
    beside: tuple[Grid, ...] = ()
    """Heights and widths of the clean pictures behind its row's, in tokens."""
    half: int | None = None
    """0 for a guided row's sequence with the prompt, 1 for the negative one; None for no guidance."""


class Network(Protocol):
    """One forward over rows that differ in everything, packed by sequence."""

    device: torch.device
    dtype: torch.dtype
    """The dtype of its weights and of every row's tensors."""

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its blocks, in order."""

    @property
    def conditioning(self) -> Mapping[str, int]:
        """Channels of the tensors that every row with a picture carries, by name.

        `noise` and `image_latents` are among them. A row that is generated carries `noise` alone: the network of a
        checkpoint that generates reads no other, unless for companions that such a row does not have. A row with
        references has their tokens beside these: :data:`giornata_denoiser.families.protocol.REFERENCES`.
        """

    @property
    def references(self) -> ReferencePolicy:
        """Return which clean pictures stand behind a row's."""

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:
        """Tokens beside those of a picture of `grid` that its blocks compute as the picture's, and nobody sees.

        Those of :attr:`references` and learnt padding are such; `given` are the sizes of the request's references. They
        lie behind the picture's tokens, and outside of every region: rows that compute a part of the picture take what
        a template or a step in full has kept of them.
        """

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:
        """Tokens of a sequence that attend among themselves alone and see no noise level.

        `beside` are heights and widths of its row's clean pictures.

        They are neither among the prompt's joint tokens nor companions: :meth:`prepare` makes their keys and values.
        """

    @property
    def blends(self) -> bool:
        """Whether each step ends by putting the noised picture where the row's tensor `mask` is 0, if it has one."""

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditioning of an edit with an empty mask, from that of any edit of the picture."""

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Its linear layers and convolutions, which LoRAs may change, by their paths in the checkpoint's network."""

    @property
    def prepared_bytes(self) -> int:
        """Bytes of what :meth:`prepare` makes for each step of a sequence; its prefix is counted by its tokens."""

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
        *,
        low_rank: SequenceLoras | None = None,
    ) -> object:
        """Return what the network computes of a sequence for all steps of a track: once, when the row joins.

        `low_rank` are its LoRAs; where they join later, this is made again. `beside` is as in :meth:`prefix_tokens`.
        Tensors are on the network's device; `times` are (steps,) float32. The result does not depend on what else is in
        the batch.
        """

    def assemble(self, sequences: Sequence[SequenceInputs]) -> object:
        """The batch of `sequences`: what :meth:`predict` needs of them in every step; kept while the rows stay."""

    def predict(
        self,
        batch: object,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """One forward over all sequences of a `batch` of :meth:`assemble`; `trace` is told of every block.

        `latents` are (tokens, channels), packed by sequence: all tokens, whether computed or not. `steps` are by
        sequence: which step of its track each one makes, 0 for the first. `conditioning` and `uses` are by sequence;
        without `uses` no sequence does anything with a template, and one that takes from a template has a region.

        Returns:
            (computed_tokens, channels): the output at the regions' tokens, all tokens of sequences without a region.
        """

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Outputs with the prompt and with the negative prompt, (tokens, channels) each, combined.

        `scale` is (tokens, 1) float32, `true_cfg_scale` of each token's row.
        """

    def unpacked(self, latent: Tensor, grid: tuple[int, int]) -> Tensor:
        """One row's latent, (tokens, channels), as (latent_channels, height, width) latent pixels."""

    def packed(self, pixels: Tensor) -> Tensor:
        """The inverse of :meth:`unpacked`: (tokens, channels) of latent pixels."""


@runtime_checkable
class ShardableNetwork(Protocol):
    """A network whose batch several processes may compute together, each a share of every sequence's tokens."""

    def shared(self, exchange: AllToAllGroup) -> Self:
        """The same network, whose :meth:`Network.predict` the group computes: every member calls it alike.

        Each has the whole batch and all latents, and gets the whole output. What sequences take and record of keys and
        values are those of the member's heads of each block, hidden states those of its tokens: see
        :class:`giornata.packed.sharding.Shard`.
        """

    def sites(self, block: int) -> int:
        """Attentions of a block, whose heads lie side by side in what it keeps."""


@dataclass(frozen=True, eq=False)
class ModelFamily:
    """One kind of checkpoint and the diffusers pipeline that it equals."""

    text: PromptBuilder
    schedule: NoiseSchedule
    network: Network
    share: Shard | None = None
    """Which share of every sequence this process computes; None for all of it, or nothing of it."""
    group: str = ""
    """The name of the processes that compute batches together; empty where this one computes them alone."""

    @property
    def device(self) -> torch.device:
        """Return where the network is."""
        return self.network.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of network and rows."""
        return self.network.dtype

    @cached_property
    def specs(self) -> tuple[BlockSpec, ...]:
        """The spec of every block, in order; each block may take from a template or record for one."""
        return each_block(self.network.blocks)

    @cached_property
    def operations(self) -> NetworkOperations:
        """Return what the blocks compute, by kind."""
        return NetworkOperations(self.network.blocks)

    def sites(self, block: int) -> int:
        """Attentions of a block, whose heads lie side by side in what it keeps."""
        network = self.network
        return int(network.sites(block)) if isinstance(network, ShardableNetwork) else 1

    def heads(self, block: int) -> int:
        """Heads of which this process takes and keeps a block's keys and values."""
        heads, sites = self.specs[block].heads, self.sites(block)
        if self.share is None:
            return heads
        own = self.share.heads(heads // sites)
        count: int = own.stop - own.start
        return sites * count

    @property
    def depth(self) -> int:
        """Return how many blocks the network has."""
        return len(self.specs)
