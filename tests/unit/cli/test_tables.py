"""Tables of commands: ids whole at every width, one row a line where no terminal reads, no markup read in cells."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, Group
from rich.text import Text

from giornata_tools.tables import show, table

ID = "lora_" + "0" * 32


def shown(width: int, *, terminal: bool) -> str:
    lines = table("id", "MB", "error", numbers={"MB"}, prose={"error"})
    lines.add_row(ID, "1.5", "a long sentence " * 10 + "[end]")
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=terminal, color_system=None, markup=False)
    show(Group(lines, Text()), Text("The end."), console=console)
    return out.getvalue()


@pytest.mark.parametrize("width", [1, 20, 40, 60, 80, 200])
@pytest.mark.parametrize("terminal", [True, False])
def test_an_id_is_whole_at_every_width(width: int, terminal: bool) -> None:
    text = shown(width, terminal=terminal)
    assert ID in text
    assert "[end]" in text, "the gateway's words are no markup"


def test_where_no_terminal_reads_a_row_is_a_line() -> None:
    lines = shown(20, terminal=False).splitlines()
    assert lines[0].split() == ["id", "MB", "error"]
    assert lines[1].startswith(ID)
    assert lines[1].rstrip().endswith("[end]")


def test_a_terminal_wraps_prose_alone() -> None:
    lines = shown(80, terminal=True).splitlines()
    assert len(lines) > 5
    assert sum(ID in line for line in lines) == 1


def test_standard_output_that_is_no_terminal_has_no_colours(capsys: pytest.CaptureFixture[str]) -> None:
    lines = table("state")
    lines.add_row(Text("ready", "green"))
    show(lines)
    assert capsys.readouterr().out.split() == ["state", "ready"]
