"""Models that are trained at discrete times, as SD and SDXL: the network predicts noise or velocity.

Every sampler of :data:`giornata.schedulers.SOLVERS` runs with the checkpoint's noise schedule. The noise level of a row
is the network's own time, over the number of times it is trained at. So recordings of one sampler serve the others,
whatever scale their latents have.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import diffusers
import torch

from giornata.schedulers import SOLVERS, sampler_of
from giornata.wire.errors import InvalidField
from giornata.wire.samplers import DISCRETE_TIME, Sampler, evaluations
from giornata_denoiser.families.sampling.offers import check_offer, check_strength
from giornata_denoiser.families.sampling.table import solved
from giornata_denoiser.rows.track import SamplerTable

LINEAR: Final[Mapping[str, object]] = {"clip_sample": False, "thresholding": False}
"""What a configuration that does not say otherwise means; diffusers' own default of `clip_sample` is for pixels."""
PREDICTIONS: Final = ("epsilon", "v_prediction")
"""What every sampler can be run with."""
TRIED: Final = 4
"""Steps in which every sampler must prove linear with a checkpoint's configuration."""


class DiscreteTime:
    """Satisfies :class:`giornata_denoiser.families.protocol.NoiseSchedule`. `config` is the checkpoint's scheduler's.

    Raises:
        ValueError: a scheduler that is not served, or one that clips samples, which no matrix does.
    """

    samplers: Final = DISCRETE_TIME
    recorder: Final = Sampler.EULER
    """It evaluates the network once a level, and draws nothing."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = {**LINEAR, **config}
        self.default_sampler = sampler_of(config)
        _check_linear(self._config)
        self._made = lru_cache(maxsize=256)(self._solved)
        for sampler in self.samplers:
            self.track(sampler=sampler, steps=TRIED, strength=1.0, cells=1)

    def track(self, *, sampler: Sampler, steps: int, strength: float, cells: int) -> SamplerTable:  # noqa: ARG002 - protocol
        """The track of a row, as `StableDiffusionInpaintPipeline` and `StableDiffusionXLInpaintPipeline` make it.

        A row begins from pure noise at a strength of 1, otherwise from the noised picture.

        Raises:
            InvalidField: a sampler that is not offered, strength leaves no step to compute, or the sampler does not
                take so many steps.
        """
        check_offer(sampler, self.samplers)
        kept = evaluations(Sampler.EULER, steps, strength, keeps_whole_steps=True)
        check_strength(kept, steps, strength)
        return self._made(sampler, steps, kept, strength == 1.0)

    def _solved(self, sampler: Sampler, steps: int, kept: int, pure: bool) -> SamplerTable:  # noqa: FBT001 - of a cache
        scheduler = self._scheduler(sampler)
        try:
            scheduler.set_timesteps(steps, device="cpu")
        except ValueError as error:
            most = scheduler.config.get("original_inference_steps")  # of LCM's distillation
            raise InvalidField(
                f"The sampler {sampler} does not take so many steps.",
                field="num_inference_steps",
                received=steps,
                accepted="fewer" if most is None else f"at most {most}",
            ) from error
        first = (steps - kept) * scheduler.order
        times = scheduler.timesteps[first:].double() / scheduler.config.num_train_timesteps
        return solved(
            scheduler,
            first,
            levels=torch.cat((times, times.new_zeros(1))),
            begin=float(scheduler.init_noise_sigma) if pure else None,
            prediction=scheduler.config.prediction_type,
        )

    def _scheduler(self, sampler: Sampler) -> Any:
        solver = SOLVERS[sampler]
        return getattr(diffusers, solver.scheduler).from_config(self._config, **solver.options)


def scheduler_config(folder: Path) -> dict[str, Any]:
    """The scheduler's configuration in a checkpoint; its class may be any."""
    config: dict[str, Any] = diffusers.EulerDiscreteScheduler.load_config(
        folder, subfolder="scheduler", local_files_only=True
    )
    return config


def _check_linear(config: Mapping[str, Any]) -> None:
    """Raise ValueError where a step is no sum of what it is made of."""
    for option, accepted in LINEAR.items():
        if config[option] != accepted:
            raise ValueError(f"the scheduler option {option} is not served: received {config[option]}")
    learned = str(config.get("variance_type") or "")
    if learned.startswith("learned"):
        raise ValueError(f"the scheduler option variance_type is not served: received {learned}")
    prediction = config.get("prediction_type", PREDICTIONS[0])
    if prediction not in PREDICTIONS:
        raise ValueError(
            f"the prediction type {prediction} is not served; served are: {', '.join(PREDICTIONS)}"
        )
