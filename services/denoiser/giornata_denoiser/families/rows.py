"""Rows of a family, from the tensors that prepost made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from giornata.scheduling.batch import RowKey
from giornata.tensors import NEGATIVE, PROMPT_MASK, unpack
from giornata.wire.errors import SchemaMismatch
from giornata.wire.jobs import Inspection
from giornata.wire.requests import named_references
from giornata_denoiser.families.network import REFERENCES, ModelFamily
from giornata_denoiser.rows.adapters import NONE as NO_ADAPTERS
from giornata_denoiser.rows.adapters import Adapters
from giornata_denoiser.rows.row import GENERATOR, Prompt, Row, RowInputs, RowWishes, SamplerTable, Snapshot

NOISE = "noise"


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
