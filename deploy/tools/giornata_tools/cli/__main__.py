"""The program ``giornata``, also ``python -m giornata_tools.cli``."""

from __future__ import annotations

from giornata_tools.cli.app import cli


def main() -> None:
    """Run the command line, which exits."""
    cli.main(prog_name="giornata")


if __name__ == "__main__":
    main()
