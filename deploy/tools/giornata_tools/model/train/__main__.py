"""Train the built-in model, stage by stage; each stage goes on where it was stopped.

python -m giornata_tools.model.train all        the shipped recipe, from nothing to deploy/model/fresco
python -m giornata_tools.model.train painter    one stage: autoencoder, painter, guidance, decoder or export

`painter` and `guidance` also run as several processes, see `deploy/tools/giornata_tools/model/train/stage.py`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Final

import click
import torch

from giornata_tools.checkout import TRAINED
from giornata_tools.model.train import autoencoder, decoder, export, guidance, painter
from giornata_tools.model.train.stage import StagePlan, Unusable, joined

STEPS: Final = {"autoencoder": 1600, "painter": 20_000, "guidance": 500, "decoder": 400}
"""Steps of the shipped weights."""
STAGES: Final = {
    "autoencoder": autoencoder.run,
    "painter": painter.run,
    "guidance": guidance.run,
    "decoder": decoder.run,
}
USUAL: Final = ", ".join(f"{stage} {steps}" for stage, steps in STEPS.items())
FOLDER: Final = click.Path(path_type=Path)


@click.command(context_settings={"show_default": True})
@click.argument("stage", type=click.Choice(["all", *STEPS, "export"]))
@click.option("--folder", type=FOLDER, default=Path("out/train"), help="State, sample grids and results.")
@click.option("--steps", type=int, help=f"Of one stage, in total.  [default: {USUAL}]")
@click.option(
    "--start",
    type=FOLDER,
    metavar="CHECKPOINT",
    help="Learn on from these weights where the folder holds no state of the stage.",
)
@click.option("--seed", type=int, default=0, help="Of weights, scenes and noise.")
@click.option("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda.")
@click.option("--threads", type=int, default=torch.get_num_threads(), help="CPU threads.")
@click.option(
    "--compile",
    "compiled",
    is_flag=True,
    help="Fuse the transformer's operations (needs a C++ compiler on a CPU; minutes at first, then faster).",
)
@click.option("--checkpoint", type=FOLDER, default=TRAINED, help="Folder that export writes.")
def main(
    *,
    stage: str,
    folder: Path,
    steps: int | None,
    start: Path | None,
    seed: int,
    device: str,
    threads: int,
    checkpoint: Path,
    compiled: bool,
) -> None:
    """Train the built-in model, stage by stage; each stage goes on where it was stopped.

    `all` is the shipped recipe, from nothing to deploy/model/fresco. Exit status: 1 with a sentence; 130 after Ctrl-C,
    where the last save stays.
    """
    if start and stage == "all":
        raise click.UsageError(
            "--start goes with one stage: all of them begin with an autoencoder of their own"
        )
    torch.set_num_threads(threads)
    folder.mkdir(parents=True, exist_ok=True)
    place = torch.device(device)
    try:
        with joined(place) as ranks:
            if start and ranks.first and not (folder / "vae").exists():
                shutil.copytree(start / "vae", folder / "vae")
            ranks.meet()
            for name, run in STAGES.items():
                if stage in {"all", name}:
                    run(StagePlan(folder, steps or STEPS[name], seed, place, start, ranks, compiled))
                    ranks.meet()
            if ranks.first and stage in {"all", "export"}:
                export.run(folder, checkpoint)
    except Unusable as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
