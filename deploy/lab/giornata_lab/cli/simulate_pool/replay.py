"""``giornata simulate-pool --replay``: decisions of a live pool, decided again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import click
from pydantic import ValidationError

from giornata.scheduling.degrees.recording import DecisionRecord, from_json

SHOWN: Final = 5
"""Decisions that differ and are told."""


def replay(path: Path) -> None:
    """Tell how many decisions there are, and which are not what the rule decides now.

    Raises:
        click.ClickException: some differ, there are none, or the file is no recording.
    """
    try:
        with path.open("rb") as lines:
            recordings = list(recordings_of(lines))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    if not recordings:
        raise click.ClickException(f"{path} holds no decision.")
    different = [(number, one) for number, one in enumerate(recordings, 1) if one.replayed() != one.decision]
    for number, one in different[:SHOWN]:
        click.echo(
            f"decision {number}, at {one.now_s:.3f} s of {len(one.rows)} rows: recorded {one.decision}; "
            f"now {one.replayed()}"
        )
    if different:
        raise click.ClickException(f"{len(different)} of {len(recordings)} decisions differ.")
    click.echo(f"All {len(recordings)} decisions are equal.")


def recordings_of(lines: Iterable[bytes]) -> Iterator[DecisionRecord]:
    """A decision for each line.

    Raises:
        ValueError: a line holds something else; tells which.
    """
    for number, line in enumerate(lines, 1):
        try:
            yield from_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"line {number} is no decision of a pool: {where} {first['msg']}") from error
