"""``python -m giornata_denoiser.profiling --model FOLDER --out FILE``: measure, fit, tell, and write the profile."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field
from rich.console import Console
from rich.progress import Progress

from giornata.config import load
from giornata.gpus import VISIBLE, see_alone
from giornata.planning.cost_model import ALONE, DegreeFit, Profile, StepParallelism
from giornata.planning.operations import COMPUTE, taking_modes
from giornata.planning.step_costs import LOAD
from giornata.wire.errors import Failed
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.choices import check_present
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.profiling import fitting
from giornata_denoiser.profiling.measuring import StepMeter
from giornata_denoiser.profiling.mixtures import ProfileScope
from giornata_denoiser.profiling.profiles import write_profile
from giornata_denoiser.profiling.ranks import ProfilerRanks
from giornata_denoiser.profiling.report import report, way_name
from giornata_denoiser.startup import rehearse


class ProfilerConfig(DenoiserConfig):
    """Configuration of a profiler: the denoiser's whose steps it measures, within the denoiser's capacity."""

    out: Path = Field(description="Where the profile is written; a plot of the fit goes beside it, as .svg.")
    quick: bool = Field(
        default=False, description="Fewer sizes and rounds: half a minute with the built-in model."
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
    write_profile(config.out, profile)
    plotted = _plotted(config.out, profile, measured, spread)
    sys.stdout.write(f"{report(profile, measured, spread)}Written: {config.out}{plotted}\n")


def _plotted(
    out: Path,
    profile: Profile,
    measured: fitting.ProfileMeasurements,
    spread: Mapping[StepParallelism, fitting.ProfileMeasurements],
) -> str:
    """Draw the fits beside `out`, if that is possible; what to tell of it."""
    if find_spec("matplotlib") is None:
        return ", without a plot: the extra giornata-denoiser[bench] is not installed"
    from giornata_denoiser.profiling.scatter import scatter

    fits = {
        ALONE: (profile.compute, measured),
        **{fit.way: (fit.compute, spread[fit.way]) for fit in profile.degrees},
    }
    plots = []
    for way, (fit, found) in fits.items():
        more = "" if way == ALONE else f"-{way.degree}{'-halves' if way.halves else ''}"
        title = "" if way == ALONE else f", {way_name(way)}"
        plots.append(out.with_name(f"{out.stem}{more}.svg"))
        points = fitting.predictions(fit, found.step_samples)
        scatter(plots[-1], f"Steps of {profile.model}{title}, R² {fit.r2:.4f}", points)
    return f" and {', '.join(map(str, plots))}"


if __name__ == "__main__":
    sys.exit(main())
