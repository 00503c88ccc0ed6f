"""The terminal as every command uses it: progress bars, tables, Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import uvloop
from rich import progress
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.table import Table

from giornata.runtime import on_signals
from giornata_tools.clients.edits import EditProgress, StepCount

# A progress bar on a terminal.


@contextmanager
def drawn(
    what: str, total: int | None = None, console: Console | None = None, *, shown: bool = True
) -> Iterator[Callable[[int, int | None, str], None] | None]:
    """A bar on `console`, by default standard error, while inside; `total` is None while it is unknown.

    Yields:
        What to call with how many are done, of how many, and what is going on. None where there is no bar, such as on
        a console that is no terminal.
    """
    console = console or Console(stderr=True)
    if not shown or not console.is_terminal or console.is_dumb_terminal:
        yield None
        return
    with progress.Progress(
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=True,
    ) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=what)


@contextmanager
def edit_steps(
    pictures: int, console: Console | None = None, *, shown: bool = True
) -> Iterator[Callable[[EditProgress], bool]]:
    """A bar over the steps of all `pictures`; what it yields takes what is told, and returns whether there is a bar."""
    count = StepCount(pictures)
    with drawn(count.state, None, console, shown=shown) as update:

        def tell(told: EditProgress) -> bool:
            count.hear(told)
            if update:
                update(count.done, count.total or None, count.state)
            return update is not None

        yield tell


# Ctrl-C and SIGTERM: the first signal asks for an orderly end, the second ends the program at once.


INTERRUPTED: Final = 130
SHOW_CURSOR: Final = "\x1b[?25h"
"""A progress bar hides the cursor."""


def tell(text: str, *, ordinary: bool = False) -> None:
    """Write to standard error, or the `ordinary` output; where that is a full disk or closed, do nothing."""
    with suppress(OSError):
        print(text, end="", flush=True, file=sys.stdout if ordinary else sys.stderr)


def run(
    main: Callable[[], Awaitable[int]], *, told: str = "", end: Callable[[int], object] = os._exit
) -> int:
    """Run `main` in a loop of its own; the first signal cancels it, so that it can tidy up.

    Args:
        main: returns the exit status; a signal makes it 130.
        told: goes to standard error at the first signal.
        end: ends the program at the second signal. ``os._exit`` waits for nothing; ``sys.exit`` cancels what tidies up
            and waits for that.
    """

    async def supervised() -> int:
        task = asyncio.ensure_future(main())

        def first(_: str) -> None:
            task.cancel()
            tell(told)

        def second(_: str) -> None:
            tell(SHOW_CURSOR if sys.stderr.isatty() else "")
            end(INTERRUPTED)

        on_signals(first, second)
        try:
            return await task
        except asyncio.CancelledError:
            tell("Stopped.\n")
            return INTERRUPTED

    return uvloop.run(supervised())


# Tables of every command: one style, ids whole, and plain text with one row a line where no terminal reads.


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
