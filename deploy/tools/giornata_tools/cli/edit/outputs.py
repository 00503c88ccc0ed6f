"""Where pictures go and in which format, from what was typed after ``-o``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from giornata.wire.requests import OutputFormat

STDOUT: Final = "-"
SUFFIXES: Final[Mapping[str, OutputFormat]] = {
    ".png": OutputFormat.PNG,
    ".jpg": OutputFormat.JPEG,
    ".jpeg": OutputFormat.JPEG,
    ".webp": OutputFormat.WEBP,
}


def format_of(out: str, chosen: OutputFormat | None) -> OutputFormat:
    """The encoding to ask for: the chosen one, else what `out` ends with, else PNG on standard output.

    Raises:
        ValueError: the suffix says nothing; tells which do.
    """
    if chosen is not None:
        return chosen
    if out == STDOUT:
        return OutputFormat.PNG
    suffix = PurePath(out).suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{out} does not end with {', '.join(SUFFIXES)}; rename it or give --output-format.")
    return SUFFIXES[suffix]


def files(out: str, n: int) -> list[str]:
    """A name for each picture: `out` itself for one; OUT-0.png, OUT-1.png and so on for several.

    Raises:
        ValueError: several pictures do not fit into standard output.
    """
    if n == 1:
        return [out]
    if out == STDOUT:
        raise ValueError(f"Standard output takes one picture, not {n}; name a file.")
    path = PurePath(out)
    return [str(path.with_name(f"{path.stem}-{index}{path.suffix}")) for index in range(n)]


def preview_file(file: str, number: int, suffix: str) -> str:
    """The name of preview `number` of the picture in `file`: edited-preview-0.webp beside edited.png."""
    path = PurePath(file)
    return str(path.with_name(f"{path.stem}-preview-{number}{suffix}"))
