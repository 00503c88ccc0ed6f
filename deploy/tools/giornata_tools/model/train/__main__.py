"""Train the built-in model, stage by stage; each stage goes on where it was stopped.

python -m giornata_tools.model.train all        the shipped recipe, from nothing to deploy/model/fresco
python -m giornata_tools.model.train painter    one stage: autoencoder, painter, guidance, decoder or export

`painter` and `guidance` also run as several processes, see `deploy/tools/giornata_tools/model/train/ranks.py`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Final

import torch

from giornata_tools.model.train import autoencoder, decoder, export, guidance, painter
from giornata_tools.model.train.checkpointing import Unusable
from giornata_tools.model.train.plan import Plan
from giornata_tools.model.train.ranks import joined

STEPS: Final = {"autoencoder": 1600, "painter": 20_000, "guidance": 500, "decoder": 400}
"""Of the shipped weights."""
STAGES: Final = {
    "autoencoder": autoencoder.run,
    "painter": painter.run,
    "guidance": guidance.run,
    "decoder": decoder.run,
}
CHECKPOINT: Final = Path(__file__).parents[5] / "deploy" / "model" / "fresco"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="python -m giornata_tools.model.train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument("stage", choices=("all", *STEPS, "export"))
    root.add_argument(
        "--folder", type=Path, default=Path("out/train"), help="state, sample grids and results (%(default)s)"
    )
    usual = ", ".join(f"{stage} {steps}" for stage, steps in STEPS.items())
    root.add_argument("--steps", type=int, help=f"of one stage, in total ({usual})")
    root.add_argument(
        "--start",
        type=Path,
        metavar="CHECKPOINT",
        help="learn on from these weights where the folder holds no state of the stage",
    )
    root.add_argument("--seed", type=int, default=0, help="of weights, scenes and noise (%(default)s)")
    root.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda (%(default)s)"
    )
    root.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="CPU threads (%(default)s)"
    )
    root.add_argument(
        "--compile",
        action="store_true",
        help="fuse the transformer's operations (needs a C++ compiler on a CPU; minutes at first, then faster)",
    )
    root.add_argument(
        "--checkpoint", type=Path, default=CHECKPOINT, help="folder that export writes (%(default)s)"
    )
    return root


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 with a sentence, 2 for flags that contradict, 130 after Ctrl-C (the last save stays)."""
    flags = parser().parse_args(argv)
    if flags.start and flags.stage == "all":
        parser().error("--start goes with one stage: all of them begin with an autoencoder of their own")
    torch.set_num_threads(flags.threads)
    device = torch.device(flags.device)
    flags.folder.mkdir(parents=True, exist_ok=True)
    try:
        with joined(device) as ranks:
            if flags.start and ranks.first and not (flags.folder / "vae").exists():
                shutil.copytree(flags.start / "vae", flags.folder / "vae")
            ranks.meet()
            for name, stage in STAGES.items():
                if flags.stage in {"all", name}:
                    steps = flags.steps or STEPS[name]
                    stage(Plan(flags.folder, steps, flags.seed, device, flags.start, ranks, flags.compile))
                    ranks.meet()
            if ranks.first and flags.stage in {"all", "export"}:
                export.run(flags.folder, flags.checkpoint)
    except Unusable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
