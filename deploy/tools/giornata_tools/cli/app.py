"""The commands, each imported only when it is run: help and mistakes are told at once."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

import click

from giornata import __version__
from giornata_tools.checkout import LAB

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "edit": ("giornata_tools.cli.edit", "Repaint the masked part of a picture."),
    "generate": ("giornata_tools.cli.edit", "Make a picture from text."),
    "mask": ("giornata_tools.cli.mask", "Find what words name in a picture, and write the mask."),
    "up": ("giornata_tools.cli.system", "Run the whole system on this machine until Ctrl-C."),
    "demo": (
        "giornata_lab.cli.system",
        "Edit two photographs and three scenes with the whole system, and measure.",
    ),
    "status": ("giornata_tools.cli.status", "Show the services that are running and what they do."),
    "top": ("giornata_tools.cli.top", "Watch the workers: rows, tokens, tiers, the queue."),
    "models": ("giornata_tools.cli.status", "List the models that are served, or the options of one."),
    "lora": ("giornata_tools.cli.lora", "Upload, list, remove and profile LoRAs."),
    "webhooks": ("giornata_tools.cli.webhooks", "List, retry and remove webhooks that were not taken."),
    "keys": ("giornata_tools.cli.keys", "Make, list and revoke the API keys that gateways ask for."),
    "quarantine": (
        "giornata_tools.cli.quarantine",
        "Look into edits that were given up since every worker that had them was lost.",
    ),
    "profile": ("giornata_tools.cli.system", "Measure what a denoising step costs on this machine."),
    "quality": ("giornata_lab.cli.system", "Measure what the model's edits are worth."),
    "bench": ("giornata_lab.cli.bench", "Measure a server under load."),
    "simulate": ("giornata_lab.cli.simulate", "Simulate a cluster: policies, capacity, bounds."),
    "doctor": (
        "giornata_tools.cli.doctor",
        "Find what is missing for an edit on this machine, and say what to do.",
    ),
}
"""Name → the module that defines it under the same name (`-` as `_`), and its line in the list."""


class LazyCommandGroup(click.Group):
    """A group that knows its commands by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order in which a newcomer meets them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        """The command, imported now.

        Raises:
            click.ClickException: it comes with the lab, which is not installed.
        """
        if cmd_name not in COMMANDS:
            return None
        name = COMMANDS[cmd_name][0]
        if name.startswith(LAB) and find_spec(LAB) is None:
            raise click.ClickException(
                f"`giornata {cmd_name}` comes with the lab, giornata-lab, which is not installed: run `make setup` "
                "in the checkout, or `pip install --constraint constraints.txt --editable deploy/lab` there."
            )
        command: click.Command = getattr(importlib.import_module(name), cmd_name.replace("-", "_"))
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        """The list of commands, none of them imported."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
def cli() -> None:
    """Giornata edits pictures: the masked part is repainted, every other pixel stays exactly as it was.

    Models that generate make pictures from text, too.

    Exit status: 0 done; 1 refused or failed, with a sentence and a stable code; 2 a mistake in the command line; 130
    stopped by Ctrl-C.
    """
