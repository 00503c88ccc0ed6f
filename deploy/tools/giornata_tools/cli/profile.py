"""``giornata profile``: the denoiser's profiler, in this process's place."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import click

from giornata_tools.cli import checkout

MODEL = Path("deploy") / "model" / "fresco"
"""Of a checkout: the checkpoint that it carries."""
OUT = Path(".giornata") / "profile.json"
"""Of a checkout: where `giornata up` looks for a profile of the model that it serves."""
MODULE = "giornata_denoiser"


@click.command()
@click.option(
    "--model",
    envvar="GIORNATA_MODEL",
    show_envvar=True,
    metavar="FOLDER_OR_ID",
    help="Checkpoint to measure; default the one that the checkout carries.",
)
@click.option(
    "--device", default="auto", show_default=True, metavar="DEVICE", help="auto, cpu, cuda or cuda:N."
)
@click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Of the model; auto: bfloat16 on a GPU, float32 on a CPU.",
)
@click.option(
    "--torch-threads",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Threads that compute, as the denoiser will have.",
)
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
def profile(
    *, model: str | None, device: str, dtype: str, torch_threads: int, out: Path | None, quick: bool
) -> None:
    """Measure what a denoising step costs on this machine.

    Steps of many mixtures of rows are timed: picture sizes, masks, batch sizes, and what is computed, projected or
    taken from templates; and loads of templates. Their costs are fitted, printed with how well they predict, and
    written to FILE, which a denoiser reads at its start (GIORNATA_PROFILE). Nothing else should run meanwhile.
    """
    if find_spec(MODULE) is None:
        raise click.ClickException(
            "The denoiser, which is what is measured, is not installed here. Run `make setup` in a checkout of "
            "Giornata, or `giornata profile` where a denoiser runs."
        )
    root = checkout.find()
    if root is None and (model is None or out is None):
        raise click.UsageError("There is no checkout of Giornata here: name --model and --out.")
    chosen = model or str((root or Path()) / MODEL)
    target = out or (root or Path()) / OUT
    command, environment = profiler(
        chosen, target, os.environ, device=device, dtype=dtype, torch_threads=torch_threads, quick=quick
    )
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # noqa: S606 - signals then reach the profiler itself


def profiler(
    model: str,
    out: Path,
    env: Mapping[str, str],
    *,
    device: str,
    dtype: str,
    torch_threads: int,
    quick: bool,
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of ``python -m giornata_denoiser.profiling``; ``-P`` as in ``giornata up``."""
    flags = ["--model", model, "--device", device, "--dtype", dtype, "--out", str(out)]
    threads = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return (
        [sys.executable, "-P", "-m", f"{MODULE}.profiling", *flags, *(["--quick"] if quick else [])],
        {**env, **dict.fromkeys(threads, str(torch_threads))},
    )
