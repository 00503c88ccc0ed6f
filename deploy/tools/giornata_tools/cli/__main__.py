"""The program ``giornata``, also ``python -m giornata_tools.cli``."""

from __future__ import annotations

import importlib.util
import sys
from typing import Final

NEEDED: Final = {"aiohttp": "aiohttp", "click": "click", "numpy": "numpy", "PIL": "pillow", "rich": "rich"}
"""The extra ``cli`` of the distribution: as it is imported, and as it is called."""


def main() -> None:
    """Run the command line, which exits; with 1 and a sentence where the environment lacks the extra ``cli``."""
    missing = [called for name, called in NEEDED.items() if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(
            f"The command line needs {', '.join(missing)}: run `make setup` in the checkout, "
            "or `pip install --constraint constraints.txt --editable 'shared[cli]'` there.\n"
        )
        sys.exit(1)
    from giornata_tools.cli.app import cli  # noqa: PLC0415 - it imports what was just looked for

    cli.main(prog_name="giornata")


if __name__ == "__main__":
    main()
