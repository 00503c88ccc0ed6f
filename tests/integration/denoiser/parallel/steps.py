"""Steps of batches, by one process and by groups: equal specs make equal batches in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from giornata.packed.packing import BlockInputs
from giornata_denoiser.engine.batch_tensors import assemble
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.families.network import ModelFamily
from giornata_denoiser.parallel import RankGroup, shared
from giornata_denoiser.rows.row import Row
from tests.integration.denoiser.parallel.members import Member, Members

TOLERANCE = 1e-5
"""Tolerance of float32: sums of attention and projections are grouped otherwise."""

Latents = list[NDArray[np.float32]]
Made = tuple[ModelFamily, list[Row], Callable[[ModelFamily], Sequence[BlockInputs]]]
"""A family, rows, and what their sequences use in a forward of that family or of a share of it."""
Making = Callable[[], Made]
Together = Callable[[ModelFamily, RankGroup], ModelFamily]
"""How a group computes a batch."""


def alone(made: Making, steps: int) -> list[Latents]:
    """The rows' latents before the first of `steps`, and after each, by one process."""
    of, rows, uses = made()
    after = [values(row.latent for row in rows)]
    with torch.inference_mode():
        for _ in range(steps):
            rows = advanced(of, rows, uses(of))
            after.append(values(row.latent for row in rows))
    return after


def step_of(
    member: Member,
    making: Making,
    devices: tuple[int, ...],
    latents: Latents,
    step: int,
    epoch: int = 0,
    together: Together = shared,
) -> Latents:
    """The rows' latents after a step that a group computes."""
    name = repr(making)  # two of equal parts are equal in nothing else
    if name not in member.kept:
        member.kept[name] = making()
    of, rows, uses = member.kept[name]
    at = [
        replace(row, latent=torch.from_numpy(latent), step=step)
        for row, latent in zip(rows, latents, strict=True)
    ]
    part = together(of, member.group(devices, epoch))
    return values(row.latent for row in advanced(part, at, uses(part)))


def advanced(of: ModelFamily, rows: Sequence[Row], uses: Sequence[BlockInputs]) -> list[Row]:
    """The rows after one more step."""
    latents = [each.latent for each in denoise_step(of, assemble(of, rows), rows, uses)]
    return [replace(row, latent=latent, step=row.step + 1) for row, latent in zip(rows, latents, strict=True)]


def walk(
    members: Members, making: Making, plan: Sequence[tuple[int, ...]], together: Together = shared
) -> list[Latents]:
    """Each step by other devices, the latents carried over; they are equal to one process's at every step."""
    wanted = alone(making, len(plan))
    walked = [wanted[0]]
    for step, devices in enumerate(plan):
        answers = members.run(devices, step_of, making, devices, walked[-1], step, members.epoch, together)
        for answer in answers:
            assert_close(answer, wanted[step + 1])
        walked.append(answers[0])
    return walked


def assert_close(latents: Latents, wanted: Latents) -> None:
    for latent, other in zip(latents, wanted, strict=True):
        np.testing.assert_allclose(latent, other, rtol=0, atol=TOLERANCE)


def values(latents: Iterable[Tensor]) -> Latents:
    return [latent.numpy() for latent in latents]
