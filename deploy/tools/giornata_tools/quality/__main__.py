"""Measure the model's edits: fixed held-out scenes through the whole system, an independent checker, gates."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from giornata.wire.requests import Reuse
from giornata_tools.launcher import program
from giornata_tools.launcher.program import count
from giornata_tools.quality.evaluation import Options, evaluate
from giornata_tools.quality.report import MaskBlur

EPILOG = """\
gates, each over the whole set:
  (a) "a COLOUR SHAPE": colour and shape both right, by a checker without a model, in at least 90 %
  (b) "remove it": mean PSNR in the mask against the true background at least 24 dB
  (c) "remove it": mean gradient across the mask's border 0.8 to 1.2 times that of the truth
  and no pixel outside of a mask changed

Things are added with a hard edge, since the checker looks for them inside of the mask, and removed with the feather
that requests have by default; --mask-blur 0 shows the model's own seams. The exit status is 0 where every gate holds.

compare two runs picture by picture (SSIM, PSNR, Fréchet distance):
  python -m giornata_tools.quality --out out/full
  python -m giornata_tools.quality --out out/fast --against out/full

environment:
  GIORNATA_NATS_URL    a running system to measure, as --nats; then GIORNATA_API_KEY where its gateways ask for one, and
                       GIORNATA_NATS_PASSWORD_FILE, the observer's password: `giornata up` writes it to
                       .giornata/nats-users/clients/observer
  GIORNATA_MODEL       the checkpoint of the stack that is started otherwise, instead of the built-in one
  GIORNATA_*           every other setting of that stack's services
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    usual = MaskBlur()
    root = argparse.ArgumentParser(
        prog="python -m giornata_tools.quality",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    root.add_argument(
        "--out",
        type=Path,
        default=Path("out/quality"),
        help="folder of the pictures; numbers and page go beside it, as .json and .html (%(default)s)",
    )
    root.add_argument(
        "--against", type=Path, metavar="FOLDER", help="an earlier run's --out, to compare with"
    )
    root.add_argument("--limit", type=count, metavar="N", help="a quick look at N edits, spread over the set")
    root.add_argument("--steps", type=count, metavar="N", help="denoising steps (the model card's)")
    root.add_argument("--guidance", type=float, metavar="G", help="guidance scale (the model card's)")
    root.add_argument(
        "--mask-blur",
        type=float,
        metavar="PX",
        help=f"feather of every edit's paste (default: {usual.add:g} to add and {usual.remove:g} to remove)",
    )
    root.add_argument(
        "--reuse",
        choices=list(Reuse),
        default=Reuse.AUTO,
        help="as in a request (%(default)s); every picture of the set comes once, and is recorded first only with "
        "GIORNATA_TEMPLATE_POLICY=inline",
    )
    root.add_argument("--in-flight", type=count, default=8, metavar="N", help="edits at a time (%(default)s)")
    root.add_argument(
        "--timeout-s",
        type=float,
        default=600.0,
        metavar="S",
        help="for one edit, waiting included (%(default)g)",
    )
    root.add_argument(
        "--torch-threads",
        type=count,
        default=1,
        metavar="N",
        help="of each process that is started (%(default)s)",
    )
    root.add_argument(
        "--nats",
        default=os.environ.get("GIORNATA_NATS_URL") or None,
        metavar="URL",
        help="a running system (default: start one)",
    )
    root.add_argument(
        "--model-name", metavar="NAME", help="which model of the running system, if it serves several"
    )
    root.add_argument("--no-gates", action="store_true", help="exit with 0 whatever the gates say")
    return root


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0; 1 where a gate fails, or with a sentence on standard error; 130 after a signal."""
    options = Options(**vars(parser().parse_args(argv)))
    return program.run("quality", partial(evaluate, options))


if __name__ == "__main__":
    sys.exit(main())
