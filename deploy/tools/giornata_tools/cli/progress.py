"""The progress bar on standard error; nothing where that is not a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from giornata_tools.cli.edits import StepCount, Told


@contextmanager
def bar(pictures: int, *, shown: bool) -> Iterator[Callable[[Told], None]]:
    """A bar over the steps of all `pictures` while inside; call what it gives with everything that is told."""
    console = Console(stderr=True)
    if not shown or not console.is_terminal or console.is_dumb_terminal:
        yield _unseen
        return
    count = StepCount(pictures)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as drawn:
        task = drawn.add_task(count.state, total=None)

        def draw(told: Told) -> None:
            count.hear(told)
            drawn.update(task, description=count.state, completed=count.done, total=count.total or None)

        yield draw


def _unseen(told: Told) -> None:
    """Nobody looks."""
