"""Wheels for a machine with torch and no network: ``python -m giornata_lab.rehearsals.gpu.wheels``.

They are collected for the Python of that machine, in the versions that constraints.txt pins, into a folder that
``make gpu ARGS="--wheels DIR"`` installs from, beside that machine's own packages. torch and what it brings is never
among them; what comes with most installations of torch is with ``--all``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from giornata_lab.rehearsals.gpu import needs

OUT: Final = Path(".whl")
WITH_TORCH: Final = frozenset(
    {"torch", "triton", "filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "sympy"}
)
"""torch, and what it needs but for typing-extensions, of which a newer one is wanted."""
CARRIED: Final = (
    *("diffusers", "msgpack", "nats-py", "pydantic", "pydantic-settings"),
    *("structlog", "tenacity", "torchao", "typing-extensions", "uvloop"),
)
"""What images with torch and transformers lack, or have too old a version of; and what these bring."""
USUAL: Final = frozenset({"huggingface-hub", "numpy", "pillow", "regex", "requests", "safetensors"})
"""What they have."""
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
SITE: Final = "site"


def carried(*, everything: bool) -> list[str]:
    """The distributions that are collected, all that they bring included."""
    wanted = {name for part in ("", *needs.NEEDS) for name in needs.NEEDS.get(part, needs.ENGINE).values()}
    todo = [*(wanted if everything else ()), *CARRIED]
    left_out = WITH_TORCH | (frozenset() if everything else USUAL)
    found: set[str] = set()
    while todo:
        if (name := todo.pop()) not in found | left_out:
            found.add(name)
            todo += needs.BROUGHT.get(name, "").split()
    if everything:  # what BROUGHT does not tell: of typer, which imports nothing else of its own here
        found |= {"annotated-doc", "shellingham"}
    return sorted(found)


def command(python: str, out: Path, *, everything: bool) -> list[str]:
    """Return what pip is called with."""
    platforms = [flag for name in PLATFORMS for flag in ("--platform", name)]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"),
        *("--implementation", "cp", "--python-version", python, *platforms),
        *("--constraint", str(needs.ROOT / "constraints.txt"), "--dest", str(out)),
        *carried(everything=everything),
    ]


def installed(folder: Path) -> Path:
    """Install all wheels of `folder` beneath it, once; the folder that Python then imports from.

    Raises:
        SystemExit: there are none, or they are for another Python; says so.
    """
    wheels, site = sorted(folder.glob("*.whl")), folder / SITE
    if not wheels:
        sys.exit(f"{folder} holds no wheels; `make gpu-wheels` collects them where there is a network.")
    names, stamp = "\n".join((sys.version, *(path.name for path in wheels))), site / "installed.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != names:
        install = [
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--upgrade",
            "--target",
            str(site),
        ]
        if subprocess.run([sys.executable, "-m", "pip", *install, *map(str, wheels)], check=False).returncode:
            here = ".".join(map(str, sys.version_info[:2]))
            sys.exit(
                f"The wheels in {folder} cannot be installed; pip says why above. This Python is {here}: "
                f'`make gpu-wheels ARGS="--python {here}"` collects wheels for it.'
            )
        stamp.write_text(names, encoding="utf-8")
    return site


def used(arguments: Sequence[str]) -> list[str]:
    """`arguments` without ``--wheels DIR``, whose wheels this process and all that it starts import from now on."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels", type=Path)
    known, others = parser.parse_known_args(arguments)
    if known.wheels is not None:
        site = str(installed(known.wheels.resolve()))
        sys.path.insert(0, site)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
    return others


def main() -> None:
    """Collect wheels, and tell how many and how large they are."""
    parser = argparse.ArgumentParser(prog="make gpu-wheels", description=__doc__)
    parser.add_argument(
        "--python", default="3.12", help="version of the other machine's Python (default: 3.12)"
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder, default {OUT}")
    parser.add_argument(
        "--all", action="store_true", help="all that is imported but torch, for a machine with torch alone"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for path in options.out.glob("*.whl"):
        path.unlink()
    subprocess.run(command(options.python, options.out, everything=options.all), check=True)
    wheels = list(options.out.glob("*.whl"))
    size_mb = sum(path.stat().st_size for path in wheels) / 1e6
    print(f"{len(wheels)} wheels for Python {options.python} in {options.out}, {size_mb:.1f} MB")


if __name__ == "__main__":
    main()
