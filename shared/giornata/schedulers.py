"""The schedulers of diffusers behind samplers' names. Free of torch.

A sampler has the noise schedule of the checkpoint's own scheduler, and takes its other options from there, but for
those that its name fixes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from giornata.wire.models import Sampler


@dataclass(frozen=True)
class Solver:
    """A scheduler of diffusers, and the options that a sampler's name fixes."""

    scheduler: str
    """The class."""
    options: Mapping[str, object]


def _dpm_solver(algorithm: str, order: int, *, karras: bool) -> Solver:
    fixed = {"algorithm_type": algorithm, "solver_order": order, "use_karras_sigmas": karras}
    return Solver("DPMSolverMultistepScheduler", fixed)


SOLVERS: Final[Mapping[Sampler, Solver]] = {
    Sampler.EULER: Solver("EulerDiscreteScheduler", {}),
    Sampler.EULER_ANCESTRAL: Solver("EulerAncestralDiscreteScheduler", {}),
    Sampler.DDIM: Solver("DDIMScheduler", {}),
    Sampler.DDPM: Solver("DDPMScheduler", {}),
    Sampler.PNDM: Solver("PNDMScheduler", {"skip_prk_steps": True}),
    Sampler.DPMPP_2M: _dpm_solver("dpmsolver++", 2, karras=False),
    Sampler.DPMPP_2M_KARRAS: _dpm_solver("dpmsolver++", 2, karras=True),
    Sampler.DPMPP_2M_SDE: _dpm_solver("sde-dpmsolver++", 2, karras=False),
    Sampler.DPMPP_2M_SDE_KARRAS: _dpm_solver("sde-dpmsolver++", 2, karras=True),
    Sampler.DPMPP_3M: _dpm_solver("dpmsolver++", 3, karras=False),
    Sampler.DPMPP_3M_KARRAS: _dpm_solver("dpmsolver++", 3, karras=True),
    Sampler.UNIPC: Solver("UniPCMultistepScheduler", {}),
    Sampler.DEIS: Solver("DEISMultistepScheduler", {}),
    Sampler.HEUN: Solver("HeunDiscreteScheduler", {}),
    Sampler.LCM: Solver("LCMScheduler", {}),
}
"""The solver of each sampler of models with discrete times."""
DEFAULTS: Final[Mapping[str, object]] = {
    "algorithm_type": "dpmsolver++",
    "solver_order": 2,
    "use_karras_sigmas": False,
    "skip_prk_steps": False,
}
"""Diffusers' own, of options that some name fixes."""


def sampler_of(config: Mapping[str, Any]) -> Sampler:
    """The sampler that a checkpoint's ``scheduler_config.json`` is.

    Raises:
        ValueError: none is; says which schedulers are served.
    """
    name = config.get("_class_name")
    for sampler, solver in SOLVERS.items():
        given = {option: config.get(option, DEFAULTS[option]) for option in solver.options}
        if solver.scheduler == name and given == solver.options:
            return sampler
    served = ", ".join(dict.fromkeys(solver.scheduler for solver in SOLVERS.values()))
    fixed = {option: config[option] for option in DEFAULTS if option in config}
    raise ValueError(
        f"the scheduler {name} with {fixed or 'its defaults'} is not served; served are: {served}"
    )
