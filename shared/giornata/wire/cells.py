"""Cells: a router and the workers that it leads, with streams of their own. Gateways serve all cells. Pure.

A deployment begins with the cell :data:`MAIN`, whose subjects, streams and buckets have the names that they had before
there were cells. Those of another cell end with its name.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import StringConstraints

MAIN: Final = "main"
"""The first cell."""

CellName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]
"""A cell's name: a token of subjects, and the end of a bucket's name."""


def in_cell(subject: str, cell: str | None) -> str:
    """A subject, or a pattern of subjects, as `cell` has it; None is for what belongs to no cell."""
    return subject if cell in (None, MAIN) else f"{subject}.{cell}"


def anywhere(subject: str) -> tuple[str, str]:
    """The patterns of a subject in every cell."""
    return subject, f"{subject}.*"
