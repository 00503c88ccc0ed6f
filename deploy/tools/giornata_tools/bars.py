"""A progress bar on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress
from rich.console import Console

from giornata_tools.doors.edits import EditProgress, StepCount


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
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Call what it yields with how many of `total` are done."""
    with drawn(what, total) as update:
        yield lambda done: update(done, total, what) if update else None


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
