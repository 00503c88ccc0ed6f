"""``python -m giornata_lab.rehearsals.gpu``: brings the packages of ``--wheels``, then runs `command`."""

from __future__ import annotations

import sys
from typing import Final

from giornata_lab.rehearsals.gpu import needs, wheels

LEAST: Final = ("click", "rich")
"""What the command itself is written with."""


def main() -> None:
    """Begin the campaign, or say what it lacks."""
    arguments = wheels.used(sys.argv[1:])
    sys.path[1:1] = needs.FOLDERS
    if not all(map(needs.found, LEAST)):
        print(*needs.told(["tests", "pictures"]), sep="\n")
        sys.exit(1)
    from giornata_lab.rehearsals.gpu.command import main as command  # noqa: PLC0415 - it needs packages

    command(arguments, prog_name="python -m giornata_lab.rehearsals.gpu")


if __name__ == "__main__":
    main()
