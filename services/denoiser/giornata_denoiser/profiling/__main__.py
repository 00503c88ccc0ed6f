"""``python -m giornata_denoiser.profiling --model FOLDER --out FILE``: measure, fit, tell, and write the profile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from pydantic import Field

from giornata.config import load
from giornata.wire.errors import Failed
from giornata_denoiser.blocks.accelerator import device_for
from giornata_denoiser.checkpoint import Checkpoint, open_checkpoint
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.rehearsal import rehearse
from giornata_denoiser.profiling import fitting, making
from giornata_denoiser.profiling.measuring import Meter
from giornata_denoiser.profiling.mixtures import Extent
from giornata_denoiser.profiling.profiles import write_profile
from giornata_denoiser.profiling.report import report
from giornata_denoiser.profiling.rows import Workpieces
from giornata_denoiser.profiling.scatter import scatter

BAR = 40


class ProfilerConfig(DenoiserConfig):
    """Configuration of a profiler: the denoiser's whose steps it measures, within the denoiser's capacity."""

    out: Path = Field(description="Where the profile is written; a scatter plot goes beside it, as .svg.")
    quick: bool = Field(
        default=False, description="Fewer sizes and rounds: half a minute with the built-in model."
    )


def main() -> int:
    """Exit status of the process."""
    config = load(ProfilerConfig, "profile")
    try:
        checkpoint = open_checkpoint(config)
        rehearse(checkpoint)
        run(config, checkpoint)
    except (Failed, OSError) as error:
        sys.stderr.write(f"giornata-profile: {error}\n")
        return 1
    return 0


def run(config: ProfilerConfig, checkpoint: Checkpoint) -> None:
    """Measure `checkpoint`; OSError where the file cannot be written."""
    extent = Extent(
        checkpoint.card, checkpoint.family.blocks, config.capacity_rows, config.capacity_tokens, config.quick
    )
    device = device_for(checkpoint.family.device, budget_bytes=0)
    meter = Meter(Workpieces(checkpoint, config.template_bits, device), time.perf_counter)
    measured = making.measure(meter, extent, bar(making.count(extent)))
    profile = making.profile(
        checkpoint,
        compute=fitting.compute_fit(measured.step_samples),
        load=fitting.load_fit(measured.load_samples),
        activation=measured.activation_bytes,
        caps=making.batch_caps(measured.steps),
        measured_on=datetime.now(UTC).date().isoformat(),
    )
    write_profile(config.out, profile)
    plot = config.out.with_suffix(".svg")
    points = fitting.predictions(profile.compute.fit(), measured.step_samples)
    plot.write_text(scatter(f"Steps of {profile.model}, R² {profile.compute.r2:.4f}", points), "utf-8")
    sys.stdout.write(f"{report(profile, measured)}Written: {config.out} and {plot}\n")


def bar(total: int) -> Callable[[], None]:
    """A progress bar on standard error, if that is a terminal; call what it gives after every measurement."""
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            full = BAR * done // total
            line = f"\rMeasuring {'━' * full}{' ' * (BAR - full)} {done}/{total}"
            sys.stderr.write(line if done < total else "\r\033[K")
            sys.stderr.flush()

    return step


if __name__ == "__main__":
    sys.exit(main())
