"""The campaign's records as Markdown, for the page of results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from giornata_lab.rehearsals.gpu.campaign import Record, Status

ERROR_LINES: Final = 25
PEAKS: Final = ("matrix product", "copy on the device")
"""How the lines of `device_peaks` begin that others are held against."""
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
        sections += _section(record, peaks(kept))
    return "\n\n".join(sections) + "\n"


def peaks(records: Iterable[Record]) -> dict[str, float]:
    """What the device can do at most, by unit, as `device_peaks` has measured it: a matrix product, and a copy."""
    found = {record.part: record.report for record in records if isinstance(record.report, Mapping)}
    rows = found.get("device_peaks", {}).get("rows", ())
    return {row["unit"]: row["median"] for row in reversed(rows) if row["what"].startswith(PEAKS)}


def over_possible(rows: Rows, most: Mapping[str, float]) -> list[dict[str, Any]]:
    """`rows` with achieved over possible beside each figure whose unit has a peak."""
    return [dict(_with_shares(row, most)) for row in rows]


def _with_shares(row: Mapping[str, Any], most: Mapping[str, float]) -> Iterator[tuple[str, Any]]:
    for column, value in row.items():
        yield column, value
        unit = str(row.get("unit")) if column == "median" else column.rpartition(" ")[2]
        if unit in most and most[unit] and isinstance(value, (int, float)):
            yield (
                f"{column.removesuffix(unit)}of the peak".replace("medianof", "of"),
                round(value / most[unit], 3),
            )


def table(rows: Rows) -> str:
    """A Markdown table; columns are those of all rows, in the order in which they come up."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [
        columns,
        ["---"] * len(columns),
        *([_cell(row.get(column, "")) for column in columns] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _section(record: Record, most: Mapping[str, float]) -> list[str]:
    rows = over_possible(rows_of(record), most)
    found = [f"### {record.part}", f"{record.when[:10]}, {record.seconds:.0f} s, `{record.command}`"]
    if rows:
        found.append(table(rows))
    if record.status is not Status.DONE:
        found.append(f"{record.status.capitalize()}:\n\n```text\n{_end(record.output)}\n```")
    return found


def rows_of(record: Record) -> Rows:
    """The figures of a record; none where the part wrote none."""
    rows: Rows = record.report["rows"] if isinstance(record.report, Mapping) else []
    return rows


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
