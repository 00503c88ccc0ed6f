"""A row: one picture being denoised, as a value that changes only from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from giornata.packed.region import Region
from giornata.packed.sequences import Rotary
from giornata.planning.costs import Shape
from giornata.scheduling.batch import RowKey
from giornata.wire.errors import SchemaMismatch
from giornata_denoiser.attempts.previews import preview_steps
from giornata_denoiser.families.protocol import Family
from giornata_denoiser.rows.sigmas import SigmaGrid, scale_noise
from giornata_denoiser.rows.template import Entry, Form, Template


@dataclass(frozen=True, eq=False)
class Prompt:
    """An encoded prompt, in the transformer's dtype and on its device."""

    embeds: Tensor
    """(text_tokens, joint_dim)"""
    pooled: Tensor
    """(pooled_dim,)"""
    rotary: Rotary
    """Of the sequence that the prompt makes with the row's picture; equal ones are shared."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What a step changes of a row: with its inputs, enough to go on elsewhere."""

    step: int
    """Steps already computed."""
    latent: Tensor
    """(tokens, 4 * latent_channels) float32 on the CPU; holds every bfloat16 value exactly."""


@dataclass(frozen=True)
class Recording:
    """What a template run keeps of every block."""

    forms: frozenset[Form]
    bits: int
    """See :mod:`giornata_denoiser.rows.stored`."""
    first_block: int = 0
    """Blocks before it keep nothing."""


@dataclass(frozen=True, eq=False)
class Row:
    """One picture of a job at a step boundary. Tensors are in the transformer's dtype and on its device."""

    key: RowKey
    grid: tuple[int, int]
    """Height and width of the latent in tokens (2x2 latent pixels each)."""
    sigmas: SigmaGrid
    step: int
    """Steps already computed."""
    latent: Tensor
    """(tokens, 4 * latent_channels), packed row-major."""
    prompt: Prompt
    negative: Prompt | None
    """Present when true classifier-free guidance is on; the row is then two sequences."""
    guidance_scale: float
    """Distilled guidance; read only where the transformer embeds it."""
    true_cfg_scale: float
    conditioning: Mapping[str, Tensor]
    """(tokens, channels) each; the names and channels are the family's."""
    partial_images: int = 0
    """Previews asked for."""
    region: Region | None = None
    """What of the picture is computed; None for all of it. Outside, the latent is the noised template's."""
    template: Template | None = None
    """What the outside tokens' activations are taken from; without one, or an entry of this noise level, everything is
    computed. Read only where there is a region."""
    tolerance: float = 1.0
    """How far the noise level of an entry may be from the row's."""
    begun: bool = False
    """Whether it has made a step here: with a template, the first one is computed in full."""
    recording: Recording | None = None
    """Of a template run: what its steps leave behind."""
    entries: tuple[Entry, ...] = ()
    """What they have left so far."""
    skipped: bool = False
    """Whether its template was here and not worth taking from."""

    @property
    def steps(self) -> int:
        """Steps from the first to the last."""
        return self.sigmas.steps

    @property
    def done(self) -> bool:
        """Whether the latent is final."""
        return self.step >= self.steps

    @property
    def next_preview(self) -> int | None:
        """Which preview, 0 for the first, follows the next step; None if none does."""
        if not self.partial_images:
            return None
        shown = preview_steps(self.steps, self.partial_images)
        return shown.index(self.step + 1) if self.step + 1 in shown else None

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """The prompts of the row's sequences, the positive one first."""
        return (self.prompt,) if self.negative is None else (self.prompt, self.negative)

    @property
    def image_tokens(self) -> int:
        """Tokens of the picture."""
        return self.grid[0] * self.grid[1]

    @property
    def background(self) -> bool:
        """Template runs yield to edits."""
        return self.recording is not None

    @property
    def sigma(self) -> float:
        """Noise level of the next step."""
        return float(self.sigmas.sigmas[self.step])

    @property
    def computed_tokens(self) -> int:
        """Tokens of the picture that are computed."""
        return self.image_tokens if self.region is None else len(self.region.computed)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sequence: text and image."""
        return tuple(len(prompt.embeds) + self.image_tokens for prompt in self.prompts)

    @property
    def own_tokens(self) -> tuple[int, ...]:
        """Tokens that each sequence computes: text and image."""
        return tuple(len(prompt.embeds) + self.computed_tokens for prompt in self.prompts)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of its sequences, for the cost model."""
        return tuple(
            Shape(len(prompt.embeds), self.image_tokens, self.computed_tokens) for prompt in self.prompts
        )

    @property
    def tokens(self) -> int:
        """Tokens the row adds to a step."""
        return sum(self.own_tokens if self.template is not None and self.begun else self.lengths)

    def advanced(self, latent: Tensor, entry: Entry | None = None) -> Row:
        """The row after one more step, which may have left an entry behind."""
        entries = self.entries if entry is None else (*self.entries, entry)
        return replace(self, latent=latent, step=self.step + 1, begun=True, entries=entries)

    def export(self) -> Snapshot:
        """The row's state as a value; :func:`build_row` makes an equal row from it and the same inputs."""
        return Snapshot(self.step, self.latent.detach().to("cpu", torch.float32, copy=True))


def with_noise(row: Row, noise: Tensor) -> Row:
    """`row` with other noise, (tokens, channels): one that has not begun begins from it."""
    conditioning = {**row.conditioning, "noise": noise}
    if row.step:
        return replace(row, conditioning=conditioning)
    level = row.sigmas.sigmas[:1].to(noise.device)
    latent = scale_noise(row.conditioning["image_latents"], level, noise)
    return replace(row, conditioning=conditioning, latent=latent)


def build_row(
    family: Family,
    key: RowKey,
    *,
    grid: tuple[int, int],
    sigmas: SigmaGrid,
    text: Mapping[str, Tensor],
    conditioning: Mapping[str, Tensor],
    guidance_scale: float,
    true_cfg_scale: float = 1.0,
    partial_images: int = 0,
    region: Region | None = None,
    template: Template | None = None,
    tolerance: float = 1.0,
    recording: Recording | None = None,
    resume: Snapshot | None = None,
) -> Row:
    """A row from the tensors that prepost made.

    Args:
        family: of the checkpoint that will denoise it.
        key: names the row.
        grid: height and width of the latent in tokens.
        sigmas: its noise levels.
        text: `prompt_embeds` (text_tokens, joint_dim), `pooled_prompt_embeds` (pooled_dim,) and, for true
            classifier-free guidance, the same with the prefix `negative_`.
        conditioning: `noise`, `image_latents` and what else the family names, (tokens, channels) each.
        guidance_scale: distilled guidance.
        true_cfg_scale: above 1 and with a negative prompt, classifier-free guidance is computed.
        partial_images: previews asked for.
        region: what of the picture is computed; default all of it.
        template: what the rest is taken from.
        tolerance: how far the noise level of an entry may be from the row's.
        recording: what a template run keeps.
        resume: where an interrupted row goes on; default its beginning.

    Raises:
        SchemaMismatch: a tensor is missing or has another shape than the checkpoint takes.
    """
    tokens = grid[0] * grid[1]
    fields = {
        name: _take(family, conditioning, name, (tokens, channels))
        for name, channels in family.conditioning.items()
    }
    if resume is None:
        latent = scale_noise(fields["image_latents"], sigmas.sigmas[:1].to(family.device), fields["noise"])
    else:
        latent = _take(family, {"latent": resume.latent}, "latent", tuple(fields["noise"].shape))
    step = 0 if resume is None else resume.step
    if not 0 <= step < sigmas.steps:
        raise SchemaMismatch(
            "A row resumes at a step it does not have.", received=step, accepted=f"below {sigmas.steps}"
        )
    guided = true_cfg_scale > 1 and "negative_prompt_embeds" in text
    return Row(
        key=key,
        grid=grid,
        sigmas=sigmas,
        step=step,
        latent=latent,
        prompt=_prompt(family, text, "", grid),
        negative=_prompt(family, text, "negative_", grid) if guided else None,
        guidance_scale=guidance_scale,
        true_cfg_scale=true_cfg_scale,
        conditioning=fields,
        partial_images=partial_images,
        region=region,
        template=template,
        tolerance=tolerance,
        recording=recording,
    )


def _prompt(family: Family, text: Mapping[str, Tensor], prefix: str, grid: tuple[int, int]) -> Prompt:
    joint_dim, pooled_dim = family.prompt_channels
    embeds = _take(family, text, f"{prefix}prompt_embeds", (None, joint_dim))
    return Prompt(
        embeds=embeds,
        pooled=_take(family, text, f"{prefix}pooled_prompt_embeds", (pooled_dim,)),
        rotary=family.rotary(len(embeds), grid),
    )


def _take(family: Family, tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """`tensors[name]` in the family's dtype and on its device, if its shape fits; None fits any length."""
    tensor = tensors.get(name)
    if tensor is None:
        raise SchemaMismatch(f"A row lacks the tensor {name}.", received=", ".join(sorted(tensors)) or "none")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, found, strict=True)
    ):
        accepted = tuple("any" if want is None else want for want in shape)
        raise SchemaMismatch(f"The tensor {name} has a wrong shape.", received=found, accepted=str(accepted))
    return tensor.to(family.device, family.dtype)
