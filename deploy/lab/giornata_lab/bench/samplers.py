"""One step of the samplers of a batch, without the network: ``python -m giornata_lab.bench.samplers``.

Rows of eight samplers step together by their tables; baseline: diffusers' scheduler objects, one after the other.
Both draw noise for the two that are stochastic. Milliseconds of one batch, by channels of a token: 4 of SD's latent
pixels, 16 of SD3's, 64 of Flux's tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import diffusers
import torch

from giornata.component_configs import SOLVERS
from giornata.wire.models import Sampler
from giornata_denoiser.families.sampling import DiscreteTime
from giornata_lab.bench.compute.sampled import Sampled, batch_of, stepped
from giornata_lab.bench.options import clock_of
from giornata_lab.bench.reporting.report import Measurement, measured, write
from giornata_lab.flags import Several, option, parsed

CONFIG: Final = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "steps_offset": 1,
}
MIXED: Final = (
    Sampler.EULER,
    Sampler.EULER_ANCESTRAL,
    Sampler.DDIM,
    Sampler.PNDM,
    Sampler.DPMPP_2M,
    Sampler.DPMPP_2M_SDE,
    Sampler.UNIPC,
    Sampler.HEUN,
)
BATCHES: Final = {"8 samplers": MIXED, "Euler alone": (Sampler.EULER,) * 8}
STEPS: Final = 20
WARM: Final = 6
"""Steps before the one that is measured, so that solvers remember all they can."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--tokens", type=int, default=4096, help="of all rows"),
            option("--channels", type=Several(int), default=[4, 16, 64], help="of a token"),
            option("--repeats", type=int, default=200),
            option("--threads", type=int, default=1, help="of torch"),
            option("--device", default="cpu"),
            option("--processor-time", is_flag=True, help="of this process, not the clock"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/samplers.json``."""
    options = options_of(arguments)
    torch.set_num_threads(options.threads)
    lines = [
        _line(name, samplers, channels, options)
        for name, samplers in BATCHES.items()
        for channels in options.channels
    ]
    write("samplers", lines, workload=vars(options) | {"steps": STEPS})


@torch.inference_mode()
def _line(name: str, samplers: Sequence[Sampler], channels: int, options: SimpleNamespace) -> dict[str, Any]:
    device = torch.device(options.device)
    grid = (options.tokens // len(samplers), 1)
    outputs = [torch.randn(grid[0], channels, device=device) for _ in samplers]
    schedule = DiscreteTime(CONFIG)
    rows = [
        Sampled(
            schedule.track(sampler=sampler, steps=STEPS, strength=1.0, cells=grid[0]),
            grid,
            output.clone(),
            torch.Generator().get_state(),
        )
        for sampler, output in zip(samplers, outputs, strict=True)
    ]
    for _ in range(WARM):
        rows = stepped(rows, outputs)
    ours = batch_of(rows, outputs)
    theirs = [_scheduler(sampler, output) for sampler, output in zip(samplers, outputs, strict=True)]
    own, other = (_timed(once, options) for once in (ours, lambda: [each() for each in theirs]))
    return {
        "rows": name,
        "tokens": options.tokens,
        "channels": channels,
        "ours ms": own.as_dict(),
        "diffusers ms": other.as_dict(),
        "ratio": round(other.p50_ms / own.p50_ms, 1),
    }


def _scheduler(sampler: Sampler, output: torch.Tensor) -> Callable[[], object]:
    """One step of diffusers' own object, always the same one."""
    scheduler: Any = getattr(diffusers, SOLVERS[sampler].scheduler).from_config(
        CONFIG, **SOLVERS[sampler].options
    )
    scheduler.set_timesteps(STEPS, device=output.device)
    sample, drawn = output[None, None].clone(), {}
    if sampler.stochastic:
        drawn = {"generator": torch.Generator().manual_seed(0)}
    for time_ in scheduler.timesteps[:WARM]:
        scheduler.scale_model_input(sample, time_)
        sample = scheduler.step(output[None, None], time_, sample, return_dict=False, **drawn)[0]
    held = dict(vars(scheduler))

    def once() -> object:
        vars(scheduler).update(held)
        return scheduler.step(
            output[None, None], scheduler.timesteps[WARM], sample, return_dict=False, **drawn
        )

    return once


def _timed(once: Callable[[], object], options: SimpleNamespace) -> Measurement:
    clock, times = clock_of(options), []
    for index in range(options.repeats + options.repeats // 10):
        began = clock()
        once()
        if options.device != "cpu":
            torch.cuda.synchronize()
        if index >= options.repeats // 10:
            times.append((clock() - began) * 1000)
    return measured(times)


if __name__ == "__main__":
    main()
