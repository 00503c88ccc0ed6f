"""Progress on the terminal: a bar where there is one to draw on, else a line per step."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)


class StepProgress:
    """A context; call it with (state, step, steps) as a :data:`giornata_tools.launcher.client.Progress`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("sending", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, state: str, step: int, steps: int) -> None:
        """Show that the job entered `state`, or finished `step` of `steps`; 0 steps are none yet."""
        if self._bar:
            self._bar.update(self._task, description=state)
            if steps:
                self._bar.update(self._task, completed=step, total=steps)
        else:
            self._console.print(
                f"  {state}: step {step} of {steps}" if steps else f"  {state}", highlight=False
            )
