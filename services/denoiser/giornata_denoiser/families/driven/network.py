"""A transformer of diffusers over packed sequences, driven block by block: what all driven families share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from giornata.packed.attention import Attention, CachedKV, CachedKVRecorder, DenseKV
from giornata.packed.forward import Prefilled, TokenStream
from giornata.packed.low_rank import SequenceLoras, Where, is_text_layer
from giornata.packed.packing import (
    UNTRACED,
    BlockInputs,
    ComputeSet,
    LaneTracer,
    PackedBatch,
    Rotary,
    Segments,
    make_layout,
    to_device,
)
from giornata.packed.sharding import ShardedBatch
from giornata.planning.operations import group_blocks
from giornata.tensors import EMBEDS
from giornata.wire.models import BlockSpec
from giornata_denoiser.families.driven.forward import CleanTokens, DrivenForward, TransformerHooks, by_head
from giornata_denoiser.families.network import (
    PATCH,
    TRAIN_TIMESTEPS,
    Grid,
    Network,
    PromptBuilder,
    SequenceInputs,
    reference_tokens,
)
from giornata_denoiser.families.weights import load_flow
from giornata_denoiser.rows.row import Prompt


def by_channel(patches: Tensor) -> Tensor:
    """(tokens, pixels and their channels) as latents are packed: (tokens, channels and their pixels)."""
    tokens, width = patches.shape
    return patches.view(tokens, PATCH**2, width // PATCH**2).transpose(1, 2).flatten(1)


def by_pixel(patches: Tensor) -> Tensor:
    """The inverse of :func:`by_channel`."""
    tokens, width = patches.shape
    return patches.view(tokens, width // PATCH**2, PATCH**2).transpose(1, 2).flatten(1)


def of_complex(turns: Tensor) -> Rotary:
    """The rotary embedding of complex numbers of length 1, (tokens, head_dim / 2), one a pair of neighbours."""
    cosine, sine = (part.repeat_interleave(2, dim=1) for part in (turns.real, turns.imag))
    return cosine, sine


def numbered(tokens: int, device: torch.device, *, axis: int, axes: int, first: int = 0) -> Tensor:
    """(tokens, axes) int64: tokens that count along one axis, from `first`, and are at 0 on the others."""
    places = torch.zeros(tokens, axes, dtype=torch.long, device=device)
    places[:, axis] = torch.arange(first, first + tokens, device=device)
    return places


def multiplications(*modules: nn.Module) -> float:
    """Multiplications of one token that passes all linear layers of these modules: as many as they have weights."""
    layers = (layer for module in modules for layer in module.modules())
    return float(sum(layer.weight.numel() for layer in layers if isinstance(layer, nn.Linear)))


def spec(attn: Any, *, image: float, text: float | None = None, keys: float, sites: int = 1) -> BlockSpec:
    """A block; an image token takes `image` multiplications in all, its keys and values `keys` of them.

    A text token takes `text`, by default as many as an image token; 0 where text is not attended to. A block with more
    `sites` than one attention keeps their heads side by side, and text is part of the first alone.
    """
    hidden = int(getattr(attn, "out_dim", attn.inner_dim))  # Qwen-Image 2.1's is as wide as its heads
    inner, of_text = int(attn.inner_dim), image if text is None else text
    return BlockSpec(
        heads=sites * int(attn.heads),
        parts={"key": sites * inner, "value": sites * inner, "hidden": hidden},
        linear=image,
        text=of_text,
        outside=keys,
        pair=2.0 * inner * sites,
        text_pair=2.0 * inner if of_text else 0.0,
    )


class Prefix(NamedTuple):
    """The tokens of a block-causal sequence that attend among themselves alone: an image stream without text.

    Text of Qwen-Image 2.1 and references of Flux.2 Klein-KV are modulated as at timestep 0 and never see the picture
    that is denoised, so that no step changes them. Their keys and values are made when a row joins.
    """

    stream: Tensor
    """(tokens, channels): what enters the first block."""
    rotary: Rotary
    """Rotary embedding of the tokens."""
    attend: Attention
    """How they attend to each other."""


class PreparedSequence(NamedTuple):
    """The tensors of a sequence that are computed once, when its row joins."""

    vectors: Tensor
    """(steps, width): the modulation of every step."""
    text: Tensor
    """(text_tokens, channels): the text stream that enters the first block."""
    prefix: Prefilled = ()
    clean: Tensor | None = None
    """(1, width): the modulation of timestep 0, where companions see that."""


@dataclass(frozen=True, eq=False)
class DrivenBatch:
    """The inputs of every step of a batch besides latents and times; of one that is `shared`, this process's part."""

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

    def part(self, own: ShardedBatch) -> DrivenBatch:
        """Return what this process has of a batch that a group computes."""
        cells = map(int.__sub__, self.sequences.layout.image.lengths, self.companions)
        of_companions = [
            picture.places[picture.places >= first] - first
            for picture, first in zip(own.pictures, cells, strict=True)
        ]
        output = (
            len(picture.places) - len(behind) if picture.region is None else len(picture.region.computed)
            for picture, behind in zip(own.pictures, of_companions, strict=True)
        )
        device = self.text.device
        return replace(
            self,
            sequences=own.sequences,
            prepared=tuple(
                each._replace(prefix=[_by_share(kept, own) for kept in each.prefix]) for each in self.prepared
            ),
            text=self.text.index_select(0, own.text),
            latent_rows=self.latent_rows.index_select(0, own.image),
            companions=tuple(map(len, of_companions)),
            output=Segments(tuple(output), device),
            shared=own,
            all_companions=self.companions,
            of_companions=tuple(to_device(behind, device) for behind in of_companions),
        )


def _by_share(kept: DenseKV, own: ShardedBatch) -> DenseKV:
    """Keys and values of the heads of this process."""
    heads = own.share.heads(kept.key.shape[1])
    return DenseKV(kept.key[:, heads], kept.value[:, heads])


class DrivenNetwork(Network):
    """A transformer whose blocks run unmodified.

    Blocks of `pairs` have a text and an image stream; those behind them, `singles`, one joint stream. A subclass sets
    the hooks, and says what happens before and behind the blocks; what most transformers of diffusers do is said here.
    """

    load = classmethod(load_flow)
    clean_at_zero: bool = False
    """Whether companions are modulated as at timestep 0, whatever the step."""
    pairs: Sequence[Any]
    singles: Sequence[Any] = ()

    def __init__(self, transformer: Any) -> None:
        super().__init__(transformer)  # its hooks come before others stand in place of layers
        self.transformer = transformer
        self.hooks = TransformerHooks()
        self.rotary = lru_cache(maxsize=64)(self.rotated)
        """:meth:`rotated`, kept for pictures of one size and texts of one length."""
        self.hook()
        self._streams: dict[str, TokenStream] = {
            path: TokenStream.JOINT for block in self.singles for path in self.low_ranks.paths_in(block)
        }
        for path in (path for block in self.pairs for path in self.low_ranks.paths_in(block)):
            self._streams[path] = TokenStream.TEXT if is_text_layer(path) else TokenStream.IMAGE

    # What a family says

    @abstractmethod
    def hook(self) -> None:
        """Name the blocks and set their hooks."""

    @abstractmethod
    def normed(self, block: Any, hidden: Tensor) -> Sequence[Tensor]:
        """Return what each of a block's attentions projects of its image stream, (items, tokens of each, channels)."""

    @abstractmethod
    def vectors(self, prompt: Prompt, times: Tensor) -> Tensor:
        """(steps, hooks.width): the modulation of all steps; `times` are (steps,) float32."""

    @abstractmethod
    def rotated(self, text_tokens: int, grid: Grid, beside: tuple[Grid, ...]) -> Rotary:
        """Rotary embedding of a sequence: text, picture, companions; 0 wide where positions turn nothing.

        `beside` are the clean pictures, see :meth:`giornata_denoiser.families.network.ReferencePolicy.grids`. Text
        that is a prefix is among it, clean pictures that are one are not.
        """

    @abstractmethod
    def pair(self, block: Any, text: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        """One block of two streams, (items, tokens of each, channels) each: see :meth:`DrivenForward.batched`."""

    def single(self, block: Any, joint: Tensor) -> Tensor:
        """One block of the joint stream, (items, tokens of each, channels)."""
        raise NotImplementedError

    def attentions(self, block: Any) -> Sequence[Any]:
        """A block's attentions, in order."""
        return (block.attn,)

    def keys_values(self, attn: Any, normed: Tensor) -> tuple[Tensor, Tensor]:
        """What an attention projects of (items, tokens of each, channels): (tokens, heads, head_dim), unturned."""
        return by_head(attn, attn.to_k(normed), attn.norm_k), by_head(attn, attn.to_v(normed))

    def spec(self, block: Any) -> BlockSpec:
        """Return what one block is."""
        attn = block.attn
        keys = multiplications(attn.to_k, attn.to_v)
        return spec(attn, image=keys + multiplications(attn.to_q, *self.outputs(block)), keys=keys)

    def outputs(self, block: Any) -> Sequence[nn.Module]:
        """Modules of a block that an image token passes behind its projections, or beside them."""
        if hasattr(block, "proj_mlp"):
            return (block.proj_mlp, block.proj_out)
        return (block.attn.to_out, block.ff)

    def text_stream(self, prompt: Prompt) -> Tensor:
        """(joint_tokens, channels): what enters the first block of a prompt."""
        text: Tensor = self.transformer.context_embedder(prompt.embeds)
        return text

    def image_stream(self, latents: Tensor) -> Tensor:
        """(n, channels): what enters the first block of (n, out_channels), positions not added."""
        image: Tensor = self.transformer.x_embedder(latents)
        return image

    def positions(self, grid: Grid) -> Tensor | None:  # noqa: ARG002 - of a family that adds some
        """(cells, channels): what is added to a picture's tokens before the first block; None for nothing."""
        return None

    def companion_stream(self, count: int, conditioning: Mapping[str, Tensor]) -> Tensor:  # noqa: ARG002 - of a family that pads
        """(count, channels): a picture's companions where they enter the first block."""
        return self.image_stream(cast("Tensor", self.references.tokens(conditioning)))

    def prefix(self, prompt: Prompt, conditioning: Mapping[str, Tensor], beside: Sequence[Grid]) -> Prefix:
        """The prefix of a sequence that has one; arguments are those of :meth:`prepare`."""
        raise NotImplementedError

    def answer(self, image: Tensor) -> Tensor:
        """The output of (items, tokens of each, channels): (tokens, out_channels), packed as latents are."""
        model = self.transformer
        velocity: Tensor = model.proj_out(model.norm_out(image, image[:1, 0])).flatten(0, 1)
        return velocity

    # What all families share

    def fractions(self, times: Tensor) -> Tensor:
        """Times in 0..1, rounded to the network's dtype where diffusers does."""
        return times.to(self.dtype) / TRAIN_TIMESTEPS

    @property
    def text(self) -> PromptBuilder:
        """The embeddings of the prompt's own tokens. Padding is not computed, or attends as other text does."""
        return PromptBuilder({EMBEDS: (None, int(self.transformer.config.joint_attention_dim))})

    @property
    def out_channels(self) -> int:  # type: ignore[override]  # of the transformer
        """Channels of a token."""
        return int(self.transformer.proj_out.out_features)

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        """See :attr:`Network.blocks`."""
        return group_blocks(self.spec(block) for block in (*self.pairs, *self.singles))

    @property
    def prepared_bytes(self) -> int:
        """See :attr:`Network.prepared_bytes`."""
        return self.hooks.width * self.dtype.itemsize

    def sites(self, block: int) -> int:
        """See :meth:`Network.sites`."""
        return len(self.attentions((*self.pairs, *self.singles)[block]))

    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
        *,
        low_rank: SequenceLoras | None = None,
    ) -> PreparedSequence:
        """Modulation of all steps, the text stream and the prefix: none of them depends on the latent."""
        prefilled: Prefilled = ()
        with self.low_ranks.alone(low_rank):
            if self.prefix_tokens(prompt, beside):
                prefilled = self._prefilled(prompt, self.prefix(prompt, conditioning, beside))
            clean = self.vectors(prompt, torch.zeros_like(times[:1])) if self.clean_at_zero else None
            return PreparedSequence(self.vectors(prompt, times), self.text_stream(prompt), prefilled, clean)

    def assemble(self, sequences: Sequence[SequenceInputs]) -> DrivenBatch:
        """See :meth:`Network.assemble`. Companions lie outside of regions."""
        text = [sequence.prompt.joint_tokens for sequence in sequences]
        cells = [reference_tokens([sequence.grid]) for sequence in sequences]
        companions = tuple(sequence.companions for sequence in sequences)
        image = list(map(int.__add__, cells, companions))
        rotary = []
        for joint, own, sequence in zip(text, image, sequences, strict=True):
            first = sequence.prompt.prefix_tokens  # it lies before all others, companions behind them
            turned = self.rotary(first + joint, sequence.grid, sequence.beside)
            rotary.append([part[first:][: joint + own] for part in turned])
        latent_rows = [
            functional.pad(picture, (0, count), value=-1)
            for picture, count in zip(torch.split(torch.arange(sum(cells)), cells), companions, strict=True)
        ]
        prepared = tuple(sequence.prepared for sequence in sequences)
        regions = tuple(sequence.region for sequence in sequences)
        output = (
            count if region is None else len(region.computed)
            for count, region in zip(cells, regions, strict=True)
        )
        positions = [
            placed for sequence in sequences if (placed := self.positions(sequence.grid)) is not None
        ]
        cosine, sine = (torch.cat(part) for part in zip(*rotary, strict=True))
        batch = DrivenBatch(
            PackedBatch(make_layout(text, image, self.device), (cosine, sine), regions),
            prepared,
            torch.cat([each.text for each in prepared]),
            to_device(torch.cat(latent_rows), self.device),
            torch.cat(positions) if positions else None,
            companions,
            Segments(tuple(output), self.device),
        )
        return batch if self.ulysses is None else batch.part(self.ulysses.part(batch.sequences))

    def predict(
        self,
        batch: DrivenBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
        steps: Sequence[int],
        *,
        uses: Sequence[BlockInputs] = (),
        trace: LaneTracer = UNTRACED,
    ) -> Tensor:
        """See :meth:`Network.predict`; the output is a velocity."""
        made = [each.vectors[step : step + 1] for each, step in zip(batch.prepared, steps, strict=True)]
        prefixes = [each.prefix for each in batch.prepared]
        at_zero = [each.clean for each in batch.prepared if each.clean is not None]
        clean = CleanTokens(torch.cat(at_zero), batch.companions) if at_zero else None
        shared = batch.shared
        forward = DrivenForward(
            batch.sequences, torch.cat(made), uses, self.attend, batch.output, prefixes, shared, clean
        )
        with self.hooks.running(forward), self.low_ranks.acting(self._where(forward)):
            image = self._entering(forward, batch, latents, conditioning)
            image = self._passed(forward, batch.text, image, trace)
            _, places = batch.rows(forward.tokens.now)
            image = image if len(places) == len(image) else image.index_select(0, places)
            output = self.answer(forward.batched(image, TokenStream.OUTPUT))
        if shared is None:
            return output
        whole = tuple(region is None for region in batch.sequences.regions)
        return shared.gathered(shared.live(whole, text=False, behind=batch.all_companions), output)

    def _where(self, forward: DrivenForward) -> Where | None:
        """Return where LoRAs act in the blocks of `forward` and behind them; None for nowhere."""
        if not forward.owners:
            return None
        return lambda path: forward.spans(self._streams.get(path, TokenStream.OUTPUT))

    def _passed(self, forward: DrivenForward, text: Tensor, image: Tensor, trace: LaneTracer) -> Tensor:
        """See :meth:`giornata.packed.forward.PackedForward.passed`."""
        pair, single = partial(self._pair, forward), partial(self._single, forward)
        return forward.passed(self.pairs, self.singles, pair, single, text, image, trace)

    def _pair(
        self, forward: DrivenForward, _index: int, block: Any, text: Tensor, image: Tensor
    ) -> tuple[Tensor, Tensor]:
        if forward.tokens.hidden:
            self._project(forward, block)
        text, image = forward.batched(text, TokenStream.TEXT), forward.batched(image, TokenStream.IMAGE)
        text, image = self.pair(block, text, image)
        return text.flatten(0, 1), image.flatten(0, 1)

    def _single(self, forward: DrivenForward, _index: int, block: Any, joint: Tensor) -> Tensor:
        if forward.tokens.hidden:
            self._project(forward, block)
        return self.single(block, forward.batched(joint, TokenStream.JOINT)).flatten(0, 1)

    def _project(self, forward: DrivenForward, block: Any) -> None:
        """Keys and values of the outside tokens whose hidden state enters a block that does not compute them."""
        with forward.beyond() as hidden:
            normed = self.normed(block, forward.batched(hidden, TokenStream.IMAGE))
            sites = map(self.keys_values, self.attentions(block), normed)
            projected = [(self.hooks.rotated(key, TokenStream.IMAGE), value) for key, value in sites]
        forward.keep(projected)

    def _entering(
        self,
        forward: DrivenForward,
        batch: DrivenBatch,
        latents: Tensor,
        conditioning: Sequence[Mapping[str, Tensor]],
    ) -> Tensor:
        """(live_tokens, channels): the image stream before the first block."""
        live = forward.tokens.now
        rows, places = batch.rows(live)
        some = len(rows) < len(latents)
        behind = tuple(map(int.__mul__, batch.companions, live.whole))
        pictures = tuple(map(int.__sub__, live.layout.image.lengths, behind))
        with self.low_ranks.acting((lambda _: forward.owners.over(pictures)) if forward.owners else None):
            picture = self.image_stream(latents.index_select(0, rows) if some else latents)
        if batch.positions is not None:
            picture = picture + (batch.positions.index_select(0, rows) if some else batch.positions)
        if len(rows) == len(live.image):
            return picture
        image = picture.new_empty(len(live.image), picture.shape[1])
        image[places] = picture
        for sequence, count in enumerate(behind):
            if count:
                _, end = live.layout.image.bounds[sequence]
                with self.low_ranks.alone(forward.owners.of(sequence)):
                    image[end - count : end] = self._companions(batch, sequence, conditioning[sequence])
        return image

    def _companions(self, batch: DrivenBatch, sequence: int, conditioning: Mapping[str, Tensor]) -> Tensor:
        """(companions, channels): those of a sequence that this process computes."""
        if not batch.of_companions:
            return self.companion_stream(batch.companions[sequence], conditioning)
        chosen = batch.of_companions[sequence]
        return self.companion_stream(batch.all_companions[sequence], conditioning).index_select(0, chosen)

    def _prefilled(self, prompt: Prompt, prefix: Prefix) -> Prefilled:
        """Keys and values of a sequence's prefix, by block."""
        kept, (stream, rotary, attend) = CachedKV(None, 0), prefix
        sequences = PackedBatch(make_layout([0], [len(stream)], self.device), rotary, (None,))
        vectors = self.vectors(prompt, torch.zeros(1, device=self.device))
        uses = (BlockInputs(recorder=CachedKVRecorder(kept)),)
        with self.hooks.running(
            DrivenForward(sequences, vectors, uses, attend, sequences.layout.image)
        ) as forward:
            self._passed(forward, stream[:0], stream, UNTRACED)
        return [
            cast("DenseKV", kept.keys_values(block)) for block in range(len(self.pairs) + len(self.singles))
        ]
