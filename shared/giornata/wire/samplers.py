"""What a row's steps may be computed by, and how many evaluations of the network that takes. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class Sampler(StrEnum):
    """A solver of the way from noise to a picture; which scheduler of diffusers it is, `giornata.schedulers` tells."""

    EULER = "euler"
    EULER_ANCESTRAL = "euler_ancestral"
    DDIM = "ddim"
    DDPM = "ddpm"
    PNDM = "pndm"
    DPMPP_2M = "dpmpp_2m"
    DPMPP_2M_KARRAS = "dpmpp_2m_karras"
    DPMPP_2M_SDE = "dpmpp_2m_sde"
    DPMPP_2M_SDE_KARRAS = "dpmpp_2m_sde_karras"
    DPMPP_3M = "dpmpp_3m"
    DPMPP_3M_KARRAS = "dpmpp_3m_karras"
    UNIPC = "unipc"
    DEIS = "deis"
    HEUN = "heun"
    LCM = "lcm"
    EULER_LIGHTNING = "euler_lightning"
    """Euler's method on the noise levels that the Lightning LoRAs of Qwen-Image were distilled for."""

    @property
    def stochastic(self) -> bool:
        """Whether its steps add noise, drawn from the generator of the row's seed."""
        return self in _STOCHASTIC

    @property
    def remembers(self) -> bool:
        """Whether its steps follow from earlier ones, too: a latent alone is then no state to go on from."""
        return self not in _ONE_STEP


_STOCHASTIC: Final = frozenset(
    {
        Sampler.EULER_ANCESTRAL,
        Sampler.DDPM,
        Sampler.DPMPP_2M_SDE,
        Sampler.DPMPP_2M_SDE_KARRAS,
        Sampler.LCM,
    }
)
_ONE_STEP: Final = frozenset(
    {
        Sampler.EULER,
        Sampler.EULER_ANCESTRAL,
        Sampler.DDIM,
        Sampler.DDPM,
        Sampler.LCM,
        Sampler.EULER_LIGHTNING,
    }
)
FLOW_MATCHING: Final = (Sampler.EULER,)
"""Samplers of models that predict a velocity between noise and picture: Flux, SD3."""
WITH_LIGHTNING: Final = (*FLOW_MATCHING, Sampler.EULER_LIGHTNING)
"""Those of Qwen-Image and Qwen-Image-Edit."""
DISCRETE_TIME: Final = tuple(sampler for sampler in Sampler if sampler is not Sampler.EULER_LIGHTNING)
"""Samplers of models that are trained at a thousand discrete times: SD, SDXL."""


def evaluations(sampler: Sampler, steps: int, strength: float, *, keeps_whole_steps: bool) -> int:
    """How often the network is evaluated for a picture: `get_timesteps` of diffusers' inpainting pipelines.

    `strength` keeps the last ones of `steps`: ``int(steps * strength)`` of them with `keeps_whole_steps`, otherwise all
    but ``int(steps - steps * strength)``. Heun evaluates each but the last one twice, PNDM the second one.
    """
    if keeps_whole_steps:
        kept = min(int(steps * strength), steps)
    else:
        kept = steps - int(max(steps - min(steps * strength, steps), 0))
    if not kept:
        return 0
    if sampler is Sampler.HEUN:
        return 2 * kept - 1
    return kept + (sampler is Sampler.PNDM and steps > 1)
