"""Rows of a family, from the tensors that prepost made."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from giornata.scheduling.batch import RowKey
from giornata.wire.errors import SchemaMismatch
from giornata_denoiser.families.protocol import ModelFamily
from giornata_denoiser.rows.row import Prompt, Row, Snapshot, Track

NOISE = "noise"
NEGATIVE = "negative_"
"""Prefix of the tensors of a negative prompt's encoding."""


def build_row(
    family: ModelFamily,
    key: RowKey,
    *,
    grid: tuple[int, int],
    track: Track,
    text: Mapping[str, Tensor],
    conditioning: Mapping[str, Tensor],
    guidance_scale: float,
    true_cfg_scale: float = 1.0,
    partial_images: int = 0,
    resume: Snapshot | None = None,
    generated: bool = False,
) -> Row:
    """A row on the CPU that computes its whole picture, from the beginning or from where `resume` was interrupted.

    `text` holds the tensors of the family's text and may hold those of a negative prompt, whose names begin with
    :data:`NEGATIVE`; with them and a `true_cfg_scale` above 1, classifier-free guidance is computed. `conditioning` is
    what the family's network names, (tokens, channels) each; of a row that is `generated`, its `noise` alone.

    Raises:
        SchemaMismatch: a tensor is missing or has another shape than the checkpoint takes.
    """
    tokens = grid[0] * grid[1]
    fields = {
        name: _take(family, conditioning, name, (tokens, channels))
        for name, channels in family.network.conditioning.items()
        if name == NOISE or not generated
    }
    if resume is None:
        state = Snapshot(0, _begun(family, fields, track.numbers[0]))
    else:
        state = _resumed(family, resume, tuple(fields[NOISE].shape), track.steps)
    guided = true_cfg_scale > 1 and any(name.startswith(NEGATIVE) for name in text)
    return Row(
        key=key,
        grid=grid,
        track=track,
        step=state.step,
        latent=state.latent,
        memory=state.memory,
        prompts=tuple(
            _prompt(family, text, prefix, grid, guidance_scale)
            for prefix in (("", NEGATIVE) if guided else ("",))
        ),
        true_cfg_scale=true_cfg_scale,
        conditioning=fields,
        partial_images=partial_images,
    )


def text_shapes(family: ModelFamily, tokens: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a prompt's tensors, by name, for a prompt of so many text tokens."""
    return {
        name: tuple(tokens if side is None else side for side in shape)
        for name, shape in family.text.tensors.items()
    }


def _begun(family: ModelFamily, fields: Mapping[str, Tensor], at: Tensor) -> Tensor:
    """The latent before a row's first step, (tokens, channels): its picture noised, or noise where it has none."""
    picture, noise = fields.get("image_latents"), fields[NOISE]
    return (
        family.schedule.initial(noise, at) if picture is None else family.schedule.noised(picture, noise, at)
    )


def _resumed(family: ModelFamily, resume: Snapshot, shape: tuple[int, ...], steps: int) -> Snapshot:
    """The state of an interrupted row in the network's dtype, if it fits."""
    if not 0 <= resume.step < steps:
        raise SchemaMismatch(
            "A row resumes at a step it does not have.", received=resume.step, accepted=f"below {steps}"
        )
    if resume.step and len(resume.memory) != family.schedule.memory:
        raise SchemaMismatch(
            "A row resumes without its solver's memory.",
            received=len(resume.memory),
            accepted=str(family.schedule.memory),
        )
    latent, *memory = (
        _take(family, {"latent": tensor}, "latent", shape) for tensor in (resume.latent, *resume.memory)
    )
    return Snapshot(resume.step, latent, tuple(memory))


def _prompt(
    family: ModelFamily, text: Mapping[str, Tensor], prefix: str, grid: tuple[int, int], guidance_scale: float
) -> Prompt:
    tensors = {
        name: _take(family, text, f"{prefix}{name}", shape) for name, shape in family.text.tensors.items()
    }
    return family.text.prompt(tensors, grid, guidance_scale)


def _take(
    family: ModelFamily, tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]
) -> Tensor:
    """`tensors[name]` in the network's dtype, if its shape fits; None fits any length."""
    tensor = tensors.get(name)
    if tensor is None:
        raise SchemaMismatch(f"A row lacks the tensor {name}.", received=", ".join(sorted(tensors)) or "none")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want not in (None, have) for want, have in zip(shape, found, strict=True)
    ):
        accepted = tuple("any" if want is None else want for want in shape)
        raise SchemaMismatch(f"The tensor {name} has a wrong shape.", received=found, accepted=str(accepted))
    return tensor.to(family.dtype)
