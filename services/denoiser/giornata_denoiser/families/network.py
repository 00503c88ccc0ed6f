"""A model family towards the engine, its text, schedule and network; and its rows, from the tensors of prepost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from giornata.packed import attention
from giornata.packed.low_rank import LowRankHooks, SequenceLoras
from giornata.packed.packing import UNTRACED, BlockInputs, LaneTracer, Region
from giornata.packed.sharding import AllToAllGroup, Shard, Ulysses
from giornata.planning.operations import NetworkOperations, each_block
from giornata.scheduling.batch import RowKey
from giornata.tensors import EMBEDS, NEGATIVE, PROMPT_MASK, padding_tokens, unpack
from giornata.wire.errors import InvalidField, SchemaMismatch
from giornata.wire.jobs import Inspection
from giornata.wire.models import FLOW_MATCHING, BlockSpec, Sampler
from giornata.wire.requests import named_references
from giornata_denoiser.families.sampling import shifted_by_size
from giornata_denoiser.rows.parts import NO_ADAPTERS, Adapters
from giornata_denoiser.rows.row import GENERATOR, Prompt, Row, RowInputs, RowWishes, SamplerTable, Snapshot

# Tokens of pictures: patches of latents, clean pictures, and positions. Pure.


Grid = tuple[int, int]
"""Height and width of a picture in tokens."""
NOISE: Final = "noise"
REFERENCES: Final = "references"
"""Name in a row's conditioning of its references' tokens, (tokens, channels), one picture behind the other."""
PATCH: Final = 2
"""Latent pixels a side of a token, where tokens are patches."""
TRAIN_TIMESTEPS: Final = 1000
"""Timestep = sigma * this; the transformers are trained with it."""


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
        if not self.own or (self.replaced and given is not None):
            own = None
        parts = [part for part in (own, given) if part is not None]
        return torch.cat(parts) if parts else None


NONE: Final = ReferencePolicy(own=False)
"""For families that look at no other picture."""


def reference_tokens(grids: Sequence[Grid]) -> int:
    """Tokens of pictures."""
    return sum(height * width for height, width in grids)


def cell_positions(grid: Grid, device: torch.device, *, before: int = 0, behind: int = 0) -> Tensor:
    """(tokens, axes) int64: line and column of a picture's tokens, row-major, `before` them a place on another axis.

    So many axes `behind` them are 0.
    """
    lines, columns = (torch.arange(side, device=device) for side in grid)
    others = [torch.zeros(1, dtype=torch.long, device=device)] * behind
    return torch.cartesian_prod(torch.full_like(lines[:1], before), lines, columns, *others)


# Classifier-free guidance of outputs, as diffusers' pipelines compute it (Ho and Salimans 2022). Pure.


def guide_beyond(start: Tensor, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
    """start + scale * (positive - negative) of outputs, (tokens, channels) each; `scale` is (tokens, 1) float32."""
    return start + (scale * (positive - negative).float()).to(positive.dtype)


# Text and schedule.


@dataclass(frozen=True)
class PromptBuilder:
    """A builder of the prompts of one network."""

    tensors: Mapping[str, tuple[int | None, ...]]
    """Name and shape of an encoding's tensors; None is the number of text tokens."""
    multiple: int = 1
    """The network pads text to a multiple of so many tokens, which attend."""
    largest: int | None = None
    """Most tokens a side of a picture that the network has positions for; None for any."""
    keeps_padding: bool = False
    """Whether padding of the encoding passes the blocks as other text does: it may be kept from step to step."""
    causal: bool = False
    """Whether text attends among itself alone: all of it is a prefix."""
    kept_channels: int = 0
    """Channels of the keys and values that blocks make of a text token; 0 where text passes them itself."""

    def prompt(self, tensors: Mapping[str, Tensor], grid: Grid, guidance_scale: float) -> Prompt:
        """The prompt of one sequence, from :attr:`tensors` in the network's dtype and on their device.

        Among them may be :data:`giornata.tensors.PROMPT_MASK`, which tells a prompt's padding. `grid` is that of the
        row's picture; `guidance_scale` is for networks that embed one.

        Raises:
            InvalidField: the picture has no positions.
        """
        if self.largest is not None and max(grid) > self.largest:
            raise InvalidField(
                "The picture is larger than the model has positions for.",
                field="size",
                received=f"{grid[1]}x{grid[0]} tokens",
                accepted=f"at most {self.largest} tokens a side",
            )
        tokens = len(tensors[EMBEDS])
        apart = self.causal or self.kept_channels > 0
        return Prompt(
            {name: tensors[name] for name in self.tensors},
            0 if apart else tokens + -tokens % self.multiple,
            grid,
            guidance_scale,
            padding_tokens(tensors.get(PROMPT_MASK)) if self.keeps_padding else 0,
            tokens if self.causal else 0,
            self.kept_channels,
        )


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


# The network.


class SequenceInputs(NamedTuple):
    """The inputs of one sequence of a batch, all of them on the network's device."""

    prompt: Prompt
    grid: Grid
    region: Region | None
    """What of the picture is computed, companions being outside; None for all of it."""
    companions: int
    """How many companions its row has; see :meth:`Network.companions`."""
    prepared: Any
    """What :meth:`Network.prepare` made of the prompt."""
    beside: tuple[Grid, ...] = ()
    """Grids of the clean pictures behind its row's."""
    half: int | None = None
    """0 for a guided row's sequence with the prompt, 1 for the negative one; None for no guidance."""


class Network(ABC):
    """A network of diffusers over rows that differ in everything, packed by sequence; its modules run unmodified.

    By default it blends, looks at no other picture and has tokens of 2x2 latent pixels. `apart` are layers on which
    LoRAs act otherwise than by hooks.
    """

    kind: ClassVar[Any]
    """The class of diffusers that it runs."""
    spacing: ClassVar[staticmethod[..., dict[str, Any]]] = staticmethod(shifted_by_size)
    """How its pipeline places noise levels."""
    samplers: ClassVar[Sequence[Sampler]] = FLOW_MATCHING
    references: ReferencePolicy = NONE
    """Which clean pictures stand behind a row's."""
    blends: bool = True
    """Whether each step ends by putting the noised picture where the row's tensor `mask` is 0, if it has one."""
    shardable: bool = True
    """Whether several processes may compute a batch together, each a share of every sequence's tokens."""
    out_channels: int
    """Channels of a token's latent."""

    def __init__(self, module: Any, apart: Collection[nn.Module] = ()) -> None:
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        """The dtype of its weights and of every row's tensors."""
        self.elementwise = attention.choose_elementwise(self.device, self.dtype)
        self.attend: attention.Attention = attention.choose_attention(
            self.device, self.dtype, self.elementwise.gather
        )
        self.low_ranks = LowRankHooks(module, apart)
        self.ulysses: Ulysses | None = None
        """This process's parts of batches that several compute together; None: it computes batches alone."""

    @property
    @abstractmethod
    def text(self) -> PromptBuilder:
        """The text that it takes."""

    @property
    @abstractmethod
    def blocks(self) -> tuple[BlockSpec, ...]:
        """Its blocks, in order."""

    @property
    @abstractmethod
    def prepared_bytes(self) -> int:
        """Bytes of what :meth:`prepare` makes for each step of a sequence; its prefix is counted by its tokens."""

    @abstractmethod
    def prepare(
        self,
        prompt: Prompt,
        times: Tensor,
        conditioning: Mapping[str, Tensor],
        beside: Sequence[Grid],
        *,
        low_rank: SequenceLoras | None = None,
    ) -> Any:
        """Return what the network computes of a sequence for all steps of a track: once, when the row joins.

        `low_rank` are its LoRAs; where they join later, this is made again. `beside` is as in :meth:`prefix_tokens`.
        Tensors are on the network's device; `times` are (steps,) float32. The result does not depend on what else is in
        the batch.
        """

    @abstractmethod
    def assemble(self, sequences: Sequence[SequenceInputs]) -> Any:
        """The batch of `sequences`: what :meth:`predict` needs of them in every step; kept while the rows stay."""

    @abstractmethod
    def predict(
        self,
        batch: Any,
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

    @property
    def conditioning(self) -> Mapping[str, int]:
        """Channels of the tensors that every row with a picture carries, by name.

        `noise` and `image_latents` are among them, and of a network that blends the mask: one value a latent pixel,
        repeated. A row that is generated carries `noise` alone. A row with references has their tokens beside these:
        :data:`REFERENCES`.
        """
        return dict.fromkeys(("noise", "image_latents", "mask"), self.out_channels)

    def unmasked(self, conditioning: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The conditioning of an edit with an empty mask, from that of any edit of the picture."""
        empty = {"mask": torch.zeros_like(conditioning["mask"])}
        if "masked_image_latents" in conditioning:
            empty["masked_image_latents"] = conditioning["image_latents"]
        return {**conditioning, **empty}

    def companions(self, grid: Grid, given: Sequence[Grid] = (), *, generated: bool = False) -> int:
        """Tokens beside those of a picture of `grid` that its blocks compute as the picture's, and nobody sees.

        Those of :attr:`references` and learnt padding are such; `given` are the sizes of the request's references. They
        lie behind the picture's tokens, and outside of every region: rows that compute a part of the picture take what
        a template or a step in full has kept of them.
        """
        return reference_tokens(self.references.grids(grid, given, generated=generated))

    def prefix_tokens(self, prompt: Prompt, beside: Sequence[Grid]) -> int:  # noqa: ARG002 - of a family that has some
        """Tokens of a sequence that attend among themselves alone and see no noise level.

        `beside` are the grids of its row's clean pictures. They are neither among the prompt's joint tokens nor
        companions: :meth:`prepare` makes their keys and values.
        """
        return prompt.prefix_tokens

    @property
    def layers(self) -> Mapping[str, nn.Module]:
        """Its linear layers and convolutions, which LoRAs may change, by their paths in the checkpoint's network."""
        return self.low_ranks.layers

    def guided(self, positive: Tensor, negative: Tensor, scale: Tensor) -> Tensor:
        """Outputs with the prompt and with the negative prompt, (tokens, channels) each, combined.

        `scale` is (tokens, 1) float32, `true_cfg_scale` of each token's row.
        """
        return guide_beyond(negative, positive, negative, scale)

    def unpacked(self, latent: Tensor, grid: Grid) -> Tensor:
        """One row's latent, (tokens, channels), as (latent_channels, height, width) latent pixels.

        Tokens lie row by row, channels before pixels: `_pack_latents` of diffusers' Flux pipelines.
        """
        height, width = grid
        patches = latent.view(height, width, -1, PATCH, PATCH).permute(2, 0, 3, 1, 4)
        return patches.reshape(-1, height * PATCH, width * PATCH)

    def packed(self, pixels: Tensor) -> Tensor:
        """The inverse of :meth:`unpacked`: (tokens, channels) of latent pixels."""
        channels, height, width = pixels.shape
        patches = pixels.view(channels, height // PATCH, PATCH, width // PATCH, PATCH)
        return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * PATCH**2)

    def shared(self, exchange: AllToAllGroup) -> Self:
        """The same network, whose :meth:`predict` the group computes: every member calls it alike.

        Each has the whole batch and all latents, and gets the whole output. What sequences take and record of keys and
        values are those of the member's heads of each block, hidden states those of its tokens: see
        :class:`giornata.packed.sharding.Shard`.
        """
        member = copy(self)
        member.ulysses = Ulysses(exchange)
        return member

    def sites(self, block: int) -> int:  # noqa: ARG002 - of a family whose blocks have more
        """Attentions of a block, whose heads lie side by side in what it keeps."""
        return 1


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
        return self.network.sites(block)

    def heads(self, block: int) -> int:
        """Heads of which this process takes and keeps a block's keys and values."""
        heads, sites = self.specs[block].heads, self.sites(block)
        if self.share is None:
            return heads
        own = self.share.heads(heads // sites)
        return sites * int(own.stop - own.start)

    @cached_property
    def depth(self) -> int:
        """Return how many blocks the network has."""
        return len(self.specs)


# Rows of a family, from the tensors that prepost made.


def build_row(
    family: ModelFamily,
    key: RowKey,
    *,
    grid: tuple[int, int],
    track: SamplerTable,
    text: Mapping[str, Tensor],
    conditioning: Mapping[str, Tensor],
    guidance_scale: float,
    true_cfg_scale: float | None = None,
    partial_images: int = 0,
    resume: Snapshot | None = None,
    generated: bool = False,
    references: Sequence[Tensor] = (),
    adapters: Adapters = NO_ADAPTERS,
) -> Row:
    """A row on the CPU that computes its whole picture.

    It goes from the beginning, or from where `resume` was interrupted.

    `text` holds the tensors of the family's text and may hold those of a negative prompt, whose names begin with
    :data:`giornata.tensors.NEGATIVE`; with them and a `true_cfg_scale`, classifier-free guidance is computed.
    `guidance_scale` is for networks that embed one. `conditioning` is what the family's network names, (tokens,
    channels) each; of a row that is `generated`, its `noise` alone. `references` are clean latents, (height, width,
    channels) each, sides in tokens.
    Where the track draws noise, it has the state of the row's generator, :data:`GENERATOR`.

    Raises:
        SchemaMismatch: a tensor is missing or has another shape than the checkpoint takes.
    """
    tokens = grid[0] * grid[1]
    fields = {
        name: _take(family, conditioning, name, (tokens, channels))
        for name, channels in family.network.conditioning.items()
        if name == NOISE or not generated
    }
    given = tuple((int(each.shape[0]), int(each.shape[1])) for each in references)
    if references:
        named = named_references(references)
        shape = (None, None, family.network.conditioning["image_latents"])
        fields[REFERENCES] = torch.cat([_take(family, named, name, shape).flatten(0, 1) for name in named])
    beside = family.network.references.grids(grid, given, generated=generated)
    if resume is None:
        # Image-to-image pipelines repaint whole pictures; checkpoints that see the mask have no such pipeline.
        whole = family.network.blends and "mask" in fields and bool((fields["mask"] == 1).all())
        begin = track.begun(fields.get("image_latents"), fields[NOISE], whole=whole)
        state = Snapshot(0, begin, generator=conditioning.get(GENERATOR))
    else:
        state = _resumed(family, resume, tuple(fields[NOISE].shape), track)
    guided = true_cfg_scale is not None and any(name.startswith(NEGATIVE) for name in text)
    prompts = tuple(
        _prompt(family, text, prefix, grid, guidance_scale)
        for prefix in (("", NEGATIVE) if guided else ("",))
    )
    return Row(
        key=key,
        grid=grid,
        track=track,
        step=state.step,
        latent=state.latent,
        memory=state.memory,
        generator=_checked(state.generator) if any(track.draws) else None,
        inputs=RowInputs(
            prompts,
            fields,
            1.0 if true_cfg_scale is None else true_cfg_scale,
            beside,
            family.network.companions(grid, given, generated=generated),
            prefix=tuple(family.network.prefix_tokens(prompt, beside) for prompt in prompts),
        ),
        wishes=RowWishes(partial_images),
        adapters=adapters,
    )


def read_references(shared: bytes, inspection: Inspection) -> tuple[Tensor, ...]:
    """A job's references as :func:`build_row` takes them; `shared` are safetensors, empty where it has none.

    Raises:
        SchemaMismatch: they are not those that were inspected.
    """
    named = unpack(shared) if shared else {}
    names = named_references(inspection.reference_grids)
    grids = {name: tuple(tensor.shape[:2]) for name, tensor in named.items()}
    if grids != names:
        raise SchemaMismatch(
            "The references are not those of the inspection.", received=str(grids), accepted=str(names)
        )
    return tuple(named[name] for name in names)


def text_shapes(family: ModelFamily, tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a prompt's tensors, by name, for a prompt of so many text tokens."""
    return {
        name: tuple(tokens if side is None else side for side in shape)
        for name, shape in family.text.tensors.items()
    }


def _resumed(family: ModelFamily, resume: Snapshot, shape: tuple[int, ...], track: SamplerTable) -> Snapshot:
    """The state of an interrupted row, if it fits: latent in the network's dtype, memory at least in float32."""
    if not 0 <= resume.step < track.steps:
        raise SchemaMismatch(
            "A row resumes at a step it does not have.", received=resume.step, accepted=f"below {track.steps}"
        )
    latent, memory = _fitting({"latent": resume.latent}, "latent", shape).to(family.dtype), None
    if resume.step and track.remembered:
        states = {} if resume.memory is None else {"memory": resume.memory}
        memory = _fitting(states, "memory", (track.remembered, *shape))
        memory = memory.to(torch.promote_types(family.dtype, torch.float32))
    return Snapshot(resume.step, latent, memory, resume.generator)


def _checked(state: Tensor | None) -> Tensor:
    """`state`, if it is one of torch's CPU generator."""
    wanted = torch.Generator("cpu").get_state()
    if state is None or state.dtype is not wanted.dtype or state.shape != wanted.shape:
        raise SchemaMismatch(
            "A row that draws noise needs the state of a generator.",
            received="none" if state is None else f"{tuple(state.shape)} {state.dtype}",
            accepted=f"{tuple(wanted.shape)} {wanted.dtype}",
        )
    try:
        torch.Generator("cpu").set_state(state)
    except RuntimeError as error:
        raise SchemaMismatch("The state of a row's generator is not one.", received="other bytes") from error
    return state


def _prompt(
    family: ModelFamily, text: Mapping[str, Tensor], prefix: str, grid: tuple[int, int], guidance_scale: float
) -> Prompt:
    shapes = family.text.tensors
    tensors = {name: _take(family, text, f"{prefix}{name}", shape) for name, shape in shapes.items()}
    if f"{prefix}{PROMPT_MASK}" in text:
        tokens = next(
            tensors[name].shape[shape.index(None)] for name, shape in shapes.items() if None in shape
        )
        tensors[PROMPT_MASK] = _take(family, text, f"{prefix}{PROMPT_MASK}", (tokens,))
    return family.text.prompt(tensors, grid, guidance_scale)


def _take(
    family: ModelFamily, tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]
) -> Tensor:
    """`tensors[name]` in the network's dtype, if its shape fits."""
    return _fitting(tensors, name, shape).to(family.dtype)


def _fitting(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """`tensors[name]`, if its shape fits; None fits any length."""
    tensor = tensors.get(name)
    if tensor is None:
        raise SchemaMismatch(f"A row lacks the tensor {name}.", received=", ".join(sorted(tensors)) or "none")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, found, strict=True)
    ):
        accepted = tuple("any" if want is None else want for want in shape)
        raise SchemaMismatch(f"The tensor {name} has a wrong shape.", received=found, accepted=str(accepted))
    return tensor
