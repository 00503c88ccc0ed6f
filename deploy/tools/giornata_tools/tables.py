"""Tables of every command: one style, ids whole, and plain text with one row a line where no terminal reads."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table

PROSE_WIDTH: Final = 20
"""Characters that a column of prose keeps on a narrow terminal."""
PIPE_WIDTH: Final = 10_000


def table(
    *names: str, numbers: Collection[str] = (), prose: Collection[str] = (), title: str | None = None
) -> Table:
    """An empty table with these columns: `numbers` stand at the right, and only `prose` may be wrapped."""
    made = Table(box=None, padding=(0, 2), collapse_padding=True, pad_edge=False, header_style="bold")
    made.title, made.title_justify = title, "left"
    for name in names:
        justify: JustifyMethod = "right" if name in numbers else "left"
        made.add_column(name, justify=justify, no_wrap=name not in prose, overflow="fold")
    return made


def show(*parts: RenderableType, console: Console | None = None) -> None:
    """Print to standard output, by default. Lines too long for a terminal are left to it: nothing is cut off."""
    console = console or Console(markup=False)
    drawn = [one for part in parts for one in (part.renderables if isinstance(part, Group) else (part,))]
    needed = max((_width(one) for one in drawn if isinstance(one, Table)), default=0)
    console.width = max(console.width, needed) if console.is_terminal else PIPE_WIDTH
    console.print(*parts, highlight=False)


def _width(drawn: Table) -> int:
    """Characters of a table's narrowest line that keeps every cell whole but prose."""
    widths = (
        (one.no_wrap, max(cell_len(str(cell)) for cell in (one.header, *one.cells))) for one in drawn.columns
    )
    return sum((width if whole else min(width, PROSE_WIDTH)) + 2 for whole, width in widths)
