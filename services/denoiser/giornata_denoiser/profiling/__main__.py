"""``python -m giornata_denoiser.profiling --model FOLDER --out FILE``: measure, fit, tell, and write the profile."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Final

from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from giornata.config import load
from giornata.gpus import VISIBLE, see_alone
from giornata.planning.cost_model import DegreeFit, LinearFit, Profile, StepParallelism
from giornata.planning.operations import COMPUTE, LOAD, taking_modes
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.choices import check_present
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.fitting import write_profile
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import ProfileScope, RowSize, StepShape
from giornata_denoiser.profiling.ranks import ProfilerRanks
from giornata_denoiser.startup import rehearse


class ProfilerConfig(DenoiserConfig):
    """Configuration of a profiler: the denoiser's whose steps it measures, within the denoiser's capacity."""

    out: Path = Field(description="Where the profile is written.")
    quick: bool = Field(
        default=False, description="Fewer sizes and rounds: half a minute with the built-in model."
    )
    least_r2: float = Field(
        default=0.9,
        description="A fit of a lower R², and of errors above a tenth, is told with its worst samples, not written.",
    )


def main(flags: Sequence[str] | None = None) -> int:
    """Exit status of the profiler with `flags`, by default those of the process."""
    config, visible = load(ProfilerConfig, "profile", flags), os.environ.get(VISIBLE)
    try:
        check_present(config.device_names)
        own = see_alone(config.device_names[0] if config.device_names else config.device)
        config = config.model_copy(update={"device": own})
        checkpoint = open_checkpoint(config)
        rehearse(checkpoint)
        run(config, checkpoint, visible)
    except (Failed, OSError) as error:
        sys.stderr.write(f"giornata-profile: {error}\n")
        return 1
    return 0


def run(config: ProfilerConfig, checkpoint: Checkpoint, visible: str | None = None) -> None:
    """Measure `checkpoint`; OSError where a file cannot be written. `visible` see :class:`ProfilerRanks`."""
    family, meter = checkpoint.family, StepMeter(checkpoint, config.template_bits)
    extent = ProfileScope(
        checkpoint.card,
        family.depth,
        config.capacity_rows,
        config.capacity_tokens,
        config.quick,
        taking_modes(family.specs),
        joint=meter.text_tokens > 0,
        controls=meter.control_work is not None,
    )
    # Drawn between measurements, by no thread of its own: nothing else runs while a step is measured.
    with (
        Progress(console=Console(stderr=True), auto_refresh=False, transient=True) as progress,
        ProfilerRanks(config, checkpoint, meter, visible) as members,
    ):
        bar = partial(progress.track, description="Measuring")
        measured = fitting.measure(meter, extent, bar)
        spread = fitting.measure_spread(members, meter, extent, bar)
    profile = fitting.profile(
        checkpoint,
        compute=fitting.fit_samples(COMPUTE, measured.step_samples),
        load=fitting.fit_samples(LOAD, measured.load_samples),
        activation=measured.activation_bytes,
        degrees=tuple(
            DegreeFit(
                degree=way.degree, halves=way.halves, compute=fitting.fit_samples(COMPUTE, found.step_samples)
            )
            for way, found in spread.items()
        ),
    )
    sys.stdout.write(report(profile, measured, spread))
    check_fits(profile, measured, spread, config.least_r2)
    write_profile(config.out, profile)
    sys.stdout.write(f"Written: {config.out}\n")


GOOD: Final = 0.1
"""Where no error is above this share, R² may be low: then all that was measured took about as long."""
WORST: Final = 3
"""Samples that are told of a fit that is refused."""


def check_fits(
    profile: Profile,
    measured: fitting.ProfileMeasurements,
    spread: Mapping[StepParallelism, fitting.ProfileMeasurements],
    least_r2: float,
) -> None:
    """Raise `Failed`, which names what was predicted worst, unless every fit tells what was measured."""
    loads = measured.load_samples
    fits = [("loading", profile.load, loads, [f"{each.features[1]:.0f} bytes" for each in loads])]
    computing = [("computing", profile.compute, measured)]
    computing += [
        (f"computing at {way_name(each.way)}", each.compute, spread[each.way]) for each in profile.degrees
    ]
    fits += [
        (what, fit, tuple(found.step_samples), [_step_text(step.mixture) for step in found.steps])
        for what, fit, found in computing
    ]
    for what, fit, samples, names in fits:
        told = zip(names, fitting.predictions(fit, samples), strict=True)
        worst = sorted(told, key=lambda pair: -abs(pair[1].error))[:WORST]
        if fit.r2 >= least_r2 or abs(worst[0][1].error) <= GOOD:
            continue
        raise Failed(
            f"No profile was written, since what was measured of {what} fits no line; let nothing else run meanwhile "
            f"and measure again. Worst: {'; '.join(f'{_told(one)} for {name}' for name, one in worst)}.",
            received=f"R² {fit.r2:.3f}",
            accepted=f"{least_r2:g} and more",
        )


# What is told of a profile: weights with their units, how good they are, and the worst prediction.


UNITS: Final = {
    "calls": "ms a forward",
    "sequences": "ms a sequence",
    "linear": "ms a multiplication of linear layers",
    "attention": "ms a multiplication of attention",
    "convolution": "ms a multiplication of convolutions",
    "gathered": "ms a value that tiles gather",
    "low_rank": "ms a multiplication of LoRAs' factors",
    "segments": "ms a set of LoRAs",
    "control": "ms a multiplication of ControlNets",
    "slab": "ms a slab",
    "bytes": "ms a byte",
}


def report(
    profile: Profile,
    measured: fitting.ProfileMeasurements,
    spread: Mapping[StepParallelism, fitting.ProfileMeasurements] = MappingProxyType({}),
) -> str:
    """Lines for a terminal; `spread` is what several devices computed."""
    return "\n".join(_lines(profile, measured, spread)) + "\n"


def way_name(way: StepParallelism) -> str:
    """Return what a way is called."""
    return f"degree {way.degree}{', guidance halves' if way.halves else ''}"


def _lines(
    profile: Profile,
    measured: fitting.ProfileMeasurements,
    spread: Mapping[StepParallelism, fitting.ProfileMeasurements],
) -> Iterator[str]:
    yield f"{profile.model} ({profile.model_digest[:12]}, {profile.dtype}) on {profile.device}"
    yield ""
    yield from _computing("Computing", profile.compute, measured)
    for degree in profile.degrees:
        yield from _computing(f"Computing, {way_name(degree.way)}", degree.compute, spread[degree.way])
    yield from _table("Loading", profile.load, fitting.cross_validate(LOAD, measured.load_samples))
    off = max(fitting.predictions(profile.load, measured.load_samples), key=lambda one: abs(one.error))
    yield f"  worst: {_told(off)}"
    yield ""
    yield f"Memory: {profile.activation_bytes / 1024:.1f} KiB a computed token"


def _computing(title: str, fit: LinearFit, measured: fitting.ProfileMeasurements) -> Iterator[str]:
    yield from _table(title, fit, fitting.cross_validate(COMPUTE, measured.step_samples))
    worst = max(
        zip(measured.steps, fitting.predictions(fit, measured.step_samples), strict=True),
        key=lambda pair: abs(pair[1].error),
    )
    yield f"  worst: {_told(worst[1])} for {_step_text(worst[0].mixture)}"
    yield ""


def _table(title: str, fit: LinearFit, unseen: LinearFit) -> Iterator[str]:
    """`unseen` grades predictions of samples that were left out of the fit."""
    yield f"{title}: R² {fit.r2:.4f} over {fit.samples} sizes, {unseen.r2:.4f} on sizes not seen"
    for name, weight in zip(fit.names, fit.weights, strict=True):
        derived = ", not measured: follows from the others" if name in fit.derived else ""
        yield f"  {name:<10} {weight:>12.4g}  {UNITS[name]}{derived}"
    yield f"  residual   p50 {fit.residual_ms_p50:.3f} ms, p95 {fit.residual_ms_p95:.3f} ms"
    yield (
        f"  error      p50 {fit.error_p50:.1%}, p95 {fit.error_p95:.1%}; "
        f"not seen p50 {unseen.error_p50:.1%}, p95 {unseen.error_p95:.1%}"
    )


def _told(one: fitting.FittedSample) -> str:
    return f"{one.predicted_ms:.3f} ms predicted, {one.measured_ms:.3f} ms measured ({one.error:+.0%})"


def _step_text(step: StepShape) -> str:
    return "; ".join(f"{count} x {text}" for text, count in Counter(map(_row_text, step.rows)).items())


def _row_text(row: RowSize) -> str:
    modes = row.modes[0] if len(set(row.modes)) == 1 else "mixed"
    mask = "" if row.ratio == 1 else f", mask {row.ratio:g}"
    more = {"guided": row.guided, "LoRA": row.lora, "ControlNet": row.controlled}
    return ", ".join(
        (f"{row.height}x{row.width} tokens", f"{modes}{mask}", *(name for name in more if more[name]))
    )


if __name__ == "__main__":
    sys.exit(main())
