"""The campaign's records as Markdown, for the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tests.gpu.campaign import Record, Status

ERROR_LINES: Final = 25
Rows = Sequence[Mapping[str, Any]]


def page(records: Iterable[Record]) -> str:
    """A table of all parts, then a section each: its figures, or why there are none."""
    kept = list(records)
    parts = [
        {"part": record.part, "shows": record.shows, "status": str(record.status), "s": record.seconds}
        for record in kept
    ]
    sections = ["## On a GPU", *_machine(kept), table(parts)]
    for record in kept:
        sections += _section(record)
    return "\n\n".join(sections) + "\n"


def table(rows: Rows) -> str:
    """A Markdown table; columns are those of all rows, in the order in which they come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_cell(row.get(column, "")) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(record: Record) -> list[str]:
    rows = record.report["rows"] if isinstance(record.report, Mapping) else []
    found = [f"### {record.part}", f"{record.when[:10]}, {record.seconds:.0f} s, `{record.command}`"]
    if rows:
        found.append(table(rows))
    if record.status is not Status.DONE:
        found.append(f"{record.status.capitalize()}:\n\n```text\n{_end(record.output)}\n```")
    return found


def _machine(records: Sequence[Record]) -> list[str]:
    """The machine of the first record that knows one."""
    for record in records:
        machine = record.report.get("machine", {}) if isinstance(record.report, Mapping) else {}
        gpu = machine.get("accelerator")
        if gpu:
            torch = machine.get("versions", {}).get("torch")
            host = f"{machine.get('cores')} cores of {machine.get('cpu')}"
            return [
                f"{gpu['name']}, {gpu['memory_mib'] >> 10} GiB, CUDA {gpu['cuda']}, torch {torch}; {host}."
            ]
    return []


def _cell(value: object) -> str:
    if isinstance(value, float):
        value = f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _end(text: str) -> str:
    return "\n".join(text.splitlines()[-ERROR_LINES:])
