"""``python -m tests.gpu``: brings the packages of ``--wheels``, then runs :mod:`tests.gpu.command`."""

from __future__ import annotations

import sys
from typing import Final

from tests.gpu import needs, wheels

LEAST: Final = ("click", "rich")
"""What the command itself is written with."""


def main() -> None:
    """Begin the campaign, or say what it lacks."""
    arguments = wheels.used(sys.argv[1:])
    sys.path[1:1] = needs.FOLDERS
    if not all(map(needs.found, LEAST)):
        print(*needs.told(["tests", "pictures"]), sep="\n")
        sys.exit(1)
    from tests.gpu.command import main as command  # noqa: PLC0415 - it needs packages

    command(arguments, prog_name="python -m tests.gpu")


if __name__ == "__main__":
    main()
