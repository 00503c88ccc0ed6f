"""The whole system on this machine: in the foreground (`up`), or for four edits (`demo`)."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from giornata.families import Family
from giornata_tools.launcher import program
from giornata_tools.launcher.demo import DemoOptions, demo
from giornata_tools.launcher.program import count
from giornata_tools.launcher.up import UpOptions, up

ENVIRONMENT = """\
environment:
  GIORNATA_NATS_URL    an external NATS with JetStream instead of the embedded one
  GIORNATA_REDIS_URL   an external Redis-protocol server (no eviction!) instead of the embedded one
  GIORNATA_MODEL       a diffusers checkpoint, local folder or hub id, instead of the small trained one that ships
  GIORNATA_*           every other setting, see `python -m giornata_gateway --help` and its siblings
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(
        prog="python -m giornata_tools.launcher",
        description=__doc__,
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument(
        "--family",
        type=Family,
        choices=list(Family),
        help="serve a small model of this family with random weights instead of the trained one",
    )
    shared.add_argument(
        "--torch-threads",
        type=count,
        default=1,
        metavar="N",
        help="of each process, whatever OMP_NUM_THREADS says (%(default)s)",
    )
    verbs = root.add_subparsers(dest="verb", required=True)
    up_ = verbs.add_parser(
        "up",
        help="run until Ctrl-C",
        description="Run the stack until Ctrl-C, then drain. Accepted jobs go on at the next start.",
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    _add_up_flags(up_)
    demo_ = verbs.add_parser(
        "demo",
        help="edit two photographs and two scenes",
        description="Edit two photographs and two scenes end to end, and measure.",
        epilog=ENVIRONMENT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    _add_demo_flags(demo_)
    return root


def _add_up_flags(up_: argparse.ArgumentParser) -> None:
    up_.add_argument(
        "--host",
        default=os.environ.get("GIORNATA_HOST") or "127.0.0.1",
        help="address of the REST API, also GIORNATA_HOST (%(default)s); one that other machines reach needs "
        "GIORNATA_API_KEYS_FILE",
    )
    up_.add_argument(
        "--port",
        type=int,
        default=os.environ.get("GIORNATA_PORT") or "8000",
        help="port of the REST API, 0 for any free one, also GIORNATA_PORT (%(default)s)",
    )
    up_.add_argument("--denoisers", type=count, default=1, metavar="N", help="(%(default)s)")
    up_.add_argument(
        "--routers", type=count, default=1, metavar="N", help="one is active, others stand by (%(default)s)"
    )
    up_.add_argument("--prepost", type=count, default=1, metavar="N", help="(%(default)s)")
    up_.add_argument(
        "--nats-servers",
        type=int,
        choices=(1, 3),
        default=1,
        help="3: a cluster that loses nothing with one of its servers; its store is not that of 1 (%(default)s)",
    )


def _add_demo_flags(demo_: argparse.ArgumentParser) -> None:
    demo_.add_argument(
        "--out", type=Path, default=Path("out/demo"), help="folder of pictures and report (%(default)s)"
    )
    demo_.add_argument("--steps", type=count, default=20, help="denoising steps (%(default)s)")
    demo_.add_argument("--seed", type=int, default=7, help="(%(default)s)")
    demo_.add_argument(
        "--no-oracle", action="store_true", help="skip the comparison with diffusers, for large models"
    )


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, 1 with a sentence on standard error, 130 after a signal."""
    flags = vars(parser().parse_args(argv))
    verb = flags.pop("verb")
    if verb == "up":
        return program.run(verb, partial(up, UpOptions(**flags), partial(print, flush=True)))
    return program.run(verb, partial(demo, DemoOptions(**flags)))


if __name__ == "__main__":
    sys.exit(main())
