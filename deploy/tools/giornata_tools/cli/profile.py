"""``giornata profile``: the denoiser's profiler."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from giornata_tools import checkout
from giornata_tools.cli.options import device_option, dtype_option, model_option, torch_threads_option
from giornata_tools.terminal import INTERRUPTED

THREADS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
"""Libraries read these when they are imported."""


@click.command()
@model_option("Checkpoint to measure; default the one that the checkout carries.")
@device_option
@dtype_option
@click.option(
    "--devices",
    metavar="LIST",
    help="Devices of a pool, as of `giornata up` (cuda:0,cuda:1 or cpu,cpu): steps of several are timed, too.",
)
@torch_threads_option("Threads that compute, as the denoiser will have.")
@click.option(
    "-o",
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the profile is written; default .giornata/profile.json of the checkout, where `giornata up` looks.",
)
@click.option(
    "--quick", is_flag=True, help="Fewer sizes and rounds: half a minute with the model that ships."
)
@click.option(
    "--least-r2",
    type=float,
    default=0.9,
    show_default=True,
    help="A fit of a lower R², and of errors above a tenth, is told with its worst samples and not written.",
)
@click.pass_context
def profile(ctx: click.Context, /, *, torch_threads: int, quick: bool, least_r2: float, **given: Any) -> None:
    """Measure what a denoising step costs on this machine.

    Steps of many mixtures of rows are timed: picture sizes, masks, batch sizes, and what is computed, projected or
    taken from templates; and loads of templates. Their costs are fitted, printed with how well they predict, and
    written to FILE, which a denoiser reads at its start (GIORNATA_PROFILE). Nothing else should run meanwhile.
    """
    if find_spec("giornata_denoiser") is None:
        raise click.ClickException(
            "The denoiser, which is what is measured, is not installed here. Run `make setup` in a checkout of "
            "Giornata, or `giornata profile` where a denoiser runs."
        )
    model, out = given["model"], given["out"]
    if checkout.find() is None and (model is None or out is None):
        raise click.UsageError("There is no checkout of Giornata here: name --model and --out.")
    os.environ.update(dict.fromkeys(THREADS, str(torch_threads)))
    from giornata_denoiser.profiling.__main__ import main

    told = given | {"model": model or str(checkout.TRAINED), "out": str(out or checkout.PROFILE)}
    names = [name for name in ("model", "device", "dtype", "devices", "out") if told[name]]
    flags = [word for name in names for word in (f"--{name}", told[name])]
    flags += ["--least-r2", str(least_r2)]
    try:
        ctx.exit(main([*flags, *(["--quick"] if quick else [])]))
    except KeyboardInterrupt:
        ctx.exit(INTERRUPTED)
