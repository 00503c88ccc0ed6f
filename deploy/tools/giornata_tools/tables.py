"""Tables of every command: one style, ids whole, and plain text with one row a line where no terminal reads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

PROSE_WIDTH: Final = 20
"""Characters that a column of prose keeps on a narrow terminal."""
PIPE_WIDTH: Final = 10_000


def table(
    *names: str, numbers: Collection[str] = (), prose: Collection[str] = (), title: str | None = None
) -> Table:
    """An empty table with these columns: `numbers` stand at the right, and only `prose` may be wrapped."""
    made = Table(
        box=None, padding=(0, 2), collapse_padding=True, pad_edge=False, header_style="bold", title=title
    )
    made.title_justify = "left"
    for name in names:
        made.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=name not in prose,
            overflow="fold",
        )
    return made


def show(*parts: RenderableType, console: Console | None = None) -> None:
    """Print to standard output, by default. Lines too long for a terminal are left to it: nothing is cut off."""
    console = console or Console(markup=False)
    needed = max((_width(drawn) for drawn in _tables(parts)), default=0)
    console.width = max(console.width, needed) if console.is_terminal else PIPE_WIDTH
    console.print(*parts, highlight=False)


def _tables(parts: Iterable[RenderableType]) -> Iterator[Table]:
    for part in parts:
        if isinstance(part, Group):
            yield from _tables(part.renderables)
        elif isinstance(part, Table):
            yield part


def _width(drawn: Table) -> int:
    """Characters of a table's narrowest line that keeps every cell whole but prose."""
    widths = (
        (column.no_wrap, max(_cell_width(cell) for cell in (column.header, *column.cells)))
        for column in drawn.columns
    )
    return sum((width if whole else min(width, PROSE_WIDTH)) + 2 for whole, width in widths)


def _cell_width(cell: RenderableType) -> int:
    return max((Text(line).cell_len for line in str(cell).splitlines()), default=0)
