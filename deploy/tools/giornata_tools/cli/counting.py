"""A progress bar on standard error over things that are counted; nothing where that is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Call what it gives with how many of `total` are done."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(what, total=total)
        yield lambda done: drawn.update(task, completed=done)
