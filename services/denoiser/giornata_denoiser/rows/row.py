"""A row: one picture being denoised, as a value that changes only from step to step. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import torch
from torch import Tensor

from giornata.packed.packing import Region, to_device
from giornata.planning.operations import SequenceShape
from giornata.scheduling.batch import RowKey
from giornata.scheduling.demand import RowShape
from giornata.tensors import EMBEDS, POOLED
from giornata.wire.errors import RowPoisoned, SchemaMismatch
from giornata.wire.jobs import Priority
from giornata_denoiser.choices import CacheForm
from giornata_denoiser.rows.parts import NO_ADAPTERS, Adapters, TaylorExpansion, TaylorRule, skipped_steps
from giornata_denoiser.rows.template import CachedTemplate, Correction, Entry

NOISE: Final = 0
OUTPUT: Final = 1
STATES: Final = 2
"""Columns of a step's matrix: fresh noise, the network's output, and from here on the old states, the latent first."""


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """The table of one sampler, made once by a family's schedule; float32 tensors on the CPU.

    A row's states are its latent, and what its solver remembers of earlier steps: the memory.
    """

    times: Tensor
    """(steps,): what the network is told before each step."""
    levels: Tensor
    """(steps + 1,): the noise level before each step and after the last one, never rising, from at most 1 to 0: the
    network's own time, so that recordings serve every sampler."""
    inputs: Tensor
    """(steps,): what the latent is multiplied by before the network sees it."""
    matrices: Tensor
    """(steps, states, 2 + states): each new state from noise, output and old states; row 0 is the latent's."""
    outside: Tensor
    """(steps + 1, 2): how much of picture and of noise there is in a latent that is not computed, at each level; at the
    first one, how much a row with a mask begins with."""
    begins_whole: tuple[float, float]
    """How much of picture and of noise a row begins with that repaints a whole picture."""
    clean: Tensor
    """(steps, 2): how much of latent and of output there is in the picture that a step predicts as the end."""
    noise_dtype: torch.dtype | None = None
    """In which noise is drawn; None for the network's."""

    @property
    def steps(self) -> int:
        """Evaluations of the network."""
        return len(self.times)

    @property
    def remembered(self) -> int:
        """States beside the latent; 0 for one-step samplers."""
        return self.matrices.shape[1] - 1

    @cached_property
    def draws(self) -> tuple[bool, ...]:
        """Return whether each step adds noise."""
        return tuple((self.matrices[:, :, NOISE] != 0).any(1).tolist())

    @cached_property
    def scales(self) -> tuple[float, ...]:
        """`inputs` as numbers."""
        return tuple(self.inputs.tolist())

    def noised(self, picture: Tensor, noise: Tensor, level: int) -> Tensor:
        """What a latent is, where it is not computed, at one of `levels`; `picture` and `noise` are of equal shape."""
        of_picture, of_noise = self.outside[level].tolist()
        noised: Tensor = of_noise * noise + of_picture * picture
        return noised

    def picture(self, latent: Tensor, noise: Tensor, level: int) -> Tensor | None:
        """The inverse of :meth:`noised`; None where a latent holds noise alone."""
        of_picture, of_noise = self.outside[level].tolist()
        return (latent - of_noise * noise) / of_picture if of_picture else None

    def begun(self, picture: Tensor | None, noise: Tensor, *, whole: bool = False) -> Tensor:
        """Return where a row begins, of equal shape as `noise`.

        That is its picture, noised as inpainting pipelines do or, where the `whole` of it is repainted, image-to-image
        pipelines; without a picture it is the noise, scaled as text-to-image pipelines do.
        """
        if picture is None:
            return self.outside[0, 1].item() * noise
        if not whole:
            return self.noised(picture, noise, 0)
        of_picture, of_noise = self.begins_whole
        return of_noise * noise + of_picture * picture

    def predicted(self, latent: Tensor, output: Tensor, step: int) -> Tensor:
        """The picture that a latent is predicted to become, from it and the network's output before `step`."""
        of_latent, of_output = self.clean[step].tolist()
        clean: Tensor = of_latent * latent.float() + of_output * output.float()
        return clean.to(output.dtype)


LATENT: Final = "latents"
MEMORY: Final = "memory"
GENERATOR: Final = "generator"
"""Names of a row's state where it travels; the last one also that of its generator's where its inputs do."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The part of a row that a step changes: with its inputs, enough to go on elsewhere."""

    step: int
    """Steps already computed."""
    latent: Tensor
    """(tokens, channels) float32 on the CPU; holds every bfloat16 value exactly."""
    memory: Tensor | None = None
    """(states, tokens, channels) float32: what the solver remembers of earlier steps; None for one-step samplers."""
    generator: Tensor | None = None
    """Where the row's random numbers go on, as :attr:`Row.generator`."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name, as they travel."""
        named = {LATENT: self.latent, MEMORY: self.memory, GENERATOR: self.generator}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, step: int, tensors: Mapping[str, Tensor]) -> Self:
        """The snapshot that travelled as `tensors`.

        Raises:
            SchemaMismatch: there is no latent.
        """
        if LATENT not in tensors:
            raise SchemaMismatch("A row's state holds no latents.", received=", ".join(tensors) or "none")
        return cls(step, tensors[LATENT], tensors.get(MEMORY), tensors.get(GENERATOR))


def exported(state: Tensor) -> Tensor:
    """A copy on the CPU; RowPoisoned if it is not finite."""
    exported = state.detach().to("cpu", torch.float32, copy=True)
    if not bool(exported.isfinite().all()):
        raise RowPoisoned
    return exported


# A row: one picture being denoised, as a value that changes only from step to step.


@dataclass(frozen=True, eq=False)
class Prompt:
    """The part of its text that one sequence of a row takes; its network knows what is in it."""

    tensors: Mapping[str, Tensor]
    """By name: :data:`EMBEDS`, (text_tokens, channels), and what else the network takes."""
    joint_tokens: int
    """Text tokens that pass the network's blocks beside the picture's; 0 where they only are attended to."""
    grid: tuple[int, int] = (0, 0)
    """Height and width of the picture in tokens: positions of text may follow from it."""
    guidance_scale: float = 0.0
    """Distilled guidance; read only where the network embeds it."""
    padding_tokens: int = 0
    """How many of the joint tokens, the last ones, are padding; 0 where the encoding does not tell."""
    prefix_tokens: int = 0
    """Tokens of the encoding that attend among themselves alone, and come before all others: not joint ones."""
    kept_channels: int = 0
    """Channels of the keys and values that a network makes of a token which is only attended to."""

    @property
    def embeds(self) -> Tensor:
        """The encoding's tokens, (text_tokens, channels)."""
        return self.tensors[EMBEDS]

    @property
    def pooled(self) -> Tensor | None:
        """(pooled_dim,); None where the network takes none."""
        return self.tensors.get(POOLED)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors, and of the keys and values that are made of them."""
        kept = len(self.embeds) * self.kept_channels * self.embeds.itemsize
        return kept + sum(tensor.nbytes for tensor in self.tensors.values())

    def to(self, device: torch.device) -> Prompt:
        """The same prompt on `device`; itself where it is there already."""
        if self.embeds.device == device:
            return self
        return replace(self, tensors={name: to_device(each, device) for name, each in self.tensors.items()})


@dataclass(frozen=True)
class RecordingSpec:
    """The forms in which a row's recorded steps keep every block, and what they have left so far."""

    forms: frozenset[CacheForm]
    bits: int
    """See :mod:`giornata_denoiser.rows.template`."""
    first_block: int = 0
    """Blocks before it keep nothing."""
    name: str = ""
    """Where later edits find what an edit leaves; a template run's row is named so itself."""
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, eq=False)
class RowInputs:
    """The inputs of which a row is made: the same object in all of its steps, by which namesakes are told apart.

    Tensors are on the CPU, in the network's dtype: a process without a device can hold them. An engine copies them to
    its device when the row joins, and keeps the copies beside it.
    """

    prompts: tuple[Prompt, ...]
    """One of each sequence: the prompt and, with true classifier-free guidance, the negative prompt."""
    conditioning: Mapping[str, Tensor]
    """(tokens, channels) each; the names and channels are the family's. `noise` alone where there is no picture.
    Those of references, if there are any, have as many tokens as these."""
    true_cfg_scale: float = 1.0
    beside: tuple[tuple[int, int], ...] = ()
    """Heights and widths in tokens of the clean pictures behind its own, the first of the companions."""
    companions: int = 0
    """Tokens that its blocks compute as the picture's, and that have no latent; outside of every region."""
    prefix: tuple[int, ...] = ()
    """By sequence: tokens that attend among themselves alone and see no noise level. They are computed once, when the
    row joins, and attended to in each step. Empty where the network has no such tokens."""

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors, and of the keys and values that are made of text."""
        conditioning = sum(tensor.nbytes for tensor in self.conditioning.values())
        return conditioning + sum(prompt.size_bytes for prompt in self.prompts)


@dataclass(frozen=True, eq=False)
class RowReuse:
    """The values that a row with a region takes instead of computing them, from a template or its own steps in full."""

    template: CachedTemplate | None = None
    """What the outside tokens' activations are taken from; without one, or an entry of this noise level, everything is
    computed."""
    tolerance: float = 1.0
    """How far the noise level of an entry may be from the row's."""
    corrections: tuple[Correction, ...] | None = None
    """What is added to what its sequences take; None until a step of the row, computed in full, has learned it."""
    taught: bool = False
    """Whether its last step has taught it these corrections."""
    renewed_every: int = 0
    """Without a template: from one step that is computed in full to the next, so many; those between take the keys and
    values that the last one made of the outside tokens. 0 computes every step in full."""
    renewed_later: int = 0
    """All of these steps in full but the first one come so many steps later, less than half of `renewed_every`."""
    keeps_padding: bool = False
    """Whether steps after its first one take the keys and values that it made of its prompts' padding. Read only where
    it takes those of outside tokens, too."""
    skipped: bool = False
    """Whether it takes nothing on purpose: its template is not worth it, or its sampler would not keep the picture."""


@dataclass(frozen=True)
class RowWishes:
    """The wishes of a row's job beside the picture."""

    partial_images: int = 0
    """Previews."""
    due_s: float = math.inf
    """When its last step is to have ended, by this machine's monotonic clock; only engines of several devices ask."""
    priority: Priority = Priority.INTERACTIVE
    """Only engines of several devices ask."""


@dataclass(frozen=True, eq=False)
class Row:
    """One picture of a job at a step boundary."""

    key: RowKey
    grid: tuple[int, int]
    """Height and width of the latent in tokens."""
    track: SamplerTable
    step: int
    """Steps already computed."""
    latent: Tensor
    """(tokens, channels), packed row-major: on the CPU as it is built, and where a step has made it afterwards."""
    inputs: RowInputs
    memory: Tensor | None = None
    """(states, tokens, channels), where `latent` is, float32 or the network's dtype if that is wider: what the solver
    remembers of earlier steps; None before the first one, and for one-step samplers."""
    generator: Tensor | None = None
    """(bytes,) uint8 on the CPU: the state of torch's CPU generator from which the next noise is drawn; None where the
    track draws none."""
    region: Region | None = None
    """What of the picture is computed; None for all of it. Outside, the latent is that of a noised picture: of
    :meth:`picture_at`, else of its own."""
    reuse: RowReuse = RowReuse()
    """Read only where there is a region."""
    adapters: Adapters = NO_ADAPTERS
    """LoRAs and ControlNets that act in its steps."""
    step_cache: TaylorRule | None = None
    """By which some of its steps are not computed, and what it remembers for that; None for none."""
    records: RecordingSpec | None = None
    """What its steps leave behind: all steps of a template run; of an edit without a template, those in full."""
    wishes: RowWishes = RowWishes()
    degree: int = 0
    """Devices that made its last step here together; 0 of a row that begins here."""

    @property
    def begun(self) -> bool:
        """Return whether it has made a step here."""
        return self.degree > 0

    @property
    def steps(self) -> int:
        """Steps from the first to the last."""
        return self.track.steps

    @property
    def done(self) -> bool:
        """Return whether the latent is final."""
        return self.step >= len(self.track.times)

    @property
    def entries(self) -> tuple[Entry, ...]:
        """What its steps have left so far."""
        return () if self.records is None else self.records.entries

    @property
    def cached(self) -> TaylorExpansion | None:
        """What it remembers for its step cache."""
        return None if self.step_cache is None else self.step_cache.known

    @property
    def next_preview(self) -> int | None:
        """Return which preview, 0 for the first, follows the next step; None if none does."""
        if not self.wishes.partial_images:
            return None
        shown = preview_steps(self.steps, self.wishes.partial_images)
        return shown.index(self.step + 1) if self.step + 1 in shown else None

    @property
    def image_tokens(self) -> int:
        """Tokens of the picture."""
        return self.grid[0] * self.grid[1]

    @property
    def block_tokens(self) -> int:
        """Tokens of the picture and its companions: what a block in full computes beside text."""
        return self.image_tokens + self.inputs.companions

    @property
    def background(self) -> bool:
        """Return whether it is a template run, which yields to edits."""
        return self.records is not None and self.region is None

    @property
    def level(self) -> float:
        """Noise level of the next step."""
        return float(self.track.levels[self.step])

    def picture_at(self, step: int) -> Tensor | None:
        """(tokens, channels): the picture in the latent of its template's run where that was as noisy as before `step`.

        None where the template knows none, and behind the last step.
        """
        template = self.reuse.template
        if template is None or step == self.steps:
            return None
        entry = template.at(float(self.track.levels[step]), self.reuse.tolerance)
        picture = None if entry is None else entry.blocks[0].picture
        return None if picture is None else picture.data

    def scaled(self, latent: Tensor) -> Tensor:
        """Return what the network sees of its `latent` in the next step."""
        factor = self.track.scales[self.step]
        return latent if factor == 1.0 else latent * factor

    @property
    def computed_tokens(self) -> int:
        """Tokens of the picture that are computed."""
        return self.image_tokens if self.region is None else self.region.computed.shape[0]

    @property
    def text_tokens(self) -> int:
        """Text tokens that pass the blocks in its next step, of all sequences."""
        return sum(shape.live_text for shape in self.shapes)

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """The most tokens that each sequence has in a masked step beside those outside: text, image and prefix."""
        return tuple(
            prompt.joint_tokens + self.computed_tokens + prefix
            for prompt, prefix in zip(self.inputs.prompts, self._prefixes, strict=True)
        )

    @property
    def shapes(self) -> tuple[SequenceShape, ...]:
        """The sequences' shapes in its next step, where everything that it takes is here; for the cost model."""
        return self.shaped(padding_kept=self.begun and self.masked)

    def shaped(self, *, padding_kept: bool) -> tuple[SequenceShape, ...]:
        """The sequences' shapes in a step that takes the padding that the row keeps, or computes all text."""
        prompts = self.inputs.prompts
        padding = self.padding if padding_kept else (0,) * len(prompts)
        tokens = self.block_tokens
        computed = tokens if self.region is None else self.computed_tokens
        low_rank = self.adapters.low_rank(self.step)
        segment = 1 / len(prompts) if low_rank else 0.0
        return tuple(
            SequenceShape(
                prompt.joint_tokens,
                tokens,
                computed,
                padding=kept,
                prefix=prefix,
                low_rank=low_rank,
                segments=segment,
                control=self.adapters.control(
                    self.step, prompt.joint_tokens, self.image_tokens, len(prompts)
                ),
            )
            for prompt, kept, prefix in zip(prompts, padding, self._prefixes, strict=True)
        )

    @property
    def joining(self) -> tuple[SequenceShape, ...]:
        """The shapes of the prefixes, as sequences of their own, that its next step computes: its first one here."""
        if self.begun:
            return ()
        low_rank = self.adapters.low_rank(self.step)
        return tuple(
            SequenceShape(0, tokens, tokens, low_rank=low_rank) for tokens in self.inputs.prefix if tokens
        )

    @property
    def estimate(self) -> RowShape:
        """The row as estimates of finish times see it."""
        first, takes = self.shapes[0], self.reuse.template is not None or self.renews
        return RowShape(
            first.text,
            first.image,
            first.computed if takes else first.image,
            self.steps - self.step,
            len(self.inputs.prompts),
            self.settled,
            self.inputs.companions,
            skipped_steps(self),
            padding=self.padding[0],
            prefix=max(self.inputs.prefix, default=0),
            low_rank=first.low_rank,
            segments=first.segments,
            control=first.control,
        )

    @property
    def _prefixes(self) -> tuple[int, ...]:
        return self.inputs.prefix or (0,) * len(self.inputs.prompts)

    @property
    def padding(self) -> tuple[int, ...]:
        """Padding tokens of each sequence that it computes once and then takes; 0 where it computes them always."""
        takes = self.region is not None and (self.reuse.template is not None or self.renews)
        kept = takes and self.reuse.keeps_padding
        return tuple(prompt.padding_tokens if kept else 0 for prompt in self.inputs.prompts)

    @property
    def settled(self) -> bool:
        """Whether its next step is like the later ones; with a template, a row without corrections begins in full."""
        joins = self.adapters.loras and self.joins_loras
        return not joins and (self.degree > 0 or self.reuse.corrections is not None)

    @property
    def joins_loras(self) -> bool:
        """Whether LoRAs act from its next step on, and did not in the one before: nothing kept of it holds then."""
        return self.degree > 0 and bool(self.adapters.loras) and self.step == self.adapters.loras_from

    @property
    def renews(self) -> bool:
        """Return whether it takes what its own steps in full make, for want of a template."""
        return self.reuse.template is None and self.region is not None and self.reuse.renewed_every > 0

    @property
    def masked(self) -> bool:
        """Return whether its next step computes its region alone, where everything that it takes is here."""
        reuse = self.reuse
        if self.region is None:
            return False
        if reuse.template is not None:
            return self.settled
        if not self.renews or not self.degree or self.joins_loras:
            return False
        since = self.step - reuse.renewed_later
        return since <= 0 or since % reuse.renewed_every > 0

    @property
    def steps_in_full(self) -> int:
        """Return how many steps compute the whole picture, of a row that runs here from the first to the last."""
        reuse = self.reuse
        if self.region is None:
            return self.steps
        if reuse.template is not None:
            return int(reuse.corrections is None)
        if not self.renews:
            return self.steps
        return math.ceil(max(1, self.steps - reuse.renewed_later) / reuse.renewed_every)

    @property
    def tokens(self) -> int:
        """Tokens the row adds to a step."""
        return self.text_tokens + len(self.inputs.prompts) * (
            self.computed_tokens if self.masked else self.block_tokens
        )

    def advanced(
        self,
        latent: Tensor,
        memory: Tensor | None = None,
        generator: Tensor | None = None,
        *,
        entry: Entry | None = None,
        corrections: tuple[Correction, ...] | None = None,
        degree: int = 1,
        cached: TaylorExpansion | None = None,
    ) -> Row:
        """The row after one more step by so many devices, which may have left an entry, or taught its corrections."""
        reuse, records, rule = self.reuse, self.records, self.step_cache
        if corrections is not None:
            reuse = replace(reuse, corrections=corrections, taught=True)
        elif reuse.taught:
            reuse = replace(reuse, taught=False)
        if entry is not None and records is not None:
            records = replace(records, entries=(*records.entries, entry))
        return replace(
            self,
            latent=latent,
            memory=memory,
            generator=generator,
            step=self.step + 1,
            degree=degree,
            reuse=reuse,
            records=records,
            step_cache=rule and replace(rule, known=cached),
        )

    def corrected(self, corrections: tuple[Correction, ...] | None) -> Row:
        """The row with other corrections; None for one that is yet to learn them."""
        return replace(self, reuse=replace(self.reuse, corrections=corrections))

    def plain(self) -> Row:
        """The row without a template, and without what its steps in full would leave."""
        return replace(self, reuse=replace(self.reuse, template=None, renewed_every=0), records=None)

    def export(self) -> Snapshot:
        """The row's state as a value: with the same inputs it makes an equal row elsewhere.

        Raises:
            RowPoisoned: it is not finite; an engine may not have known yet.
        """
        memory = None if self.memory is None else exported(self.memory)
        return Snapshot(self.step, exported(self.latent), memory, self.generator)


def preview_steps(steps: int, count: int) -> tuple[int, ...]:
    """After how many of `steps` a row is shown: `count` times, evenly spread, fewer where there are fewer steps.

    Never after the last step, since the picture itself follows, and never twice after one.
    """
    shown = min(count, steps - 1)
    parts = shown + 1
    return tuple((2 * i * steps + parts) // (2 * parts) for i in range(1, parts))
