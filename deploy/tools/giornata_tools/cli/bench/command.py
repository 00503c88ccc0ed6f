"""``giornata bench``: measure servers from outside."""

from __future__ import annotations

import click

from giornata_tools.cli.bench.baseline import baseline
from giornata_tools.cli.bench.serve import serve


@click.group()
def bench() -> None:
    """Measure a server under load."""


bench.add_command(serve)
bench.add_command(baseline)
