"""A row's way through the noise levels, as numbers: whatever the sampler, a step is one small matrix. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import torch
from torch import Tensor

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
        """Whether each step adds noise."""
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

    def begun(self, picture: Tensor | None, noise: Tensor, *, whole: bool = False) -> Tensor:
        """Where a row begins, of equal shape as `noise`.

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
