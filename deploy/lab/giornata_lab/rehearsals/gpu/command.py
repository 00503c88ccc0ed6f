"""Tests and measurements on a GPU, each in a process of its own: ``python -m giornata_lab.rehearsals.gpu``.

Every part writes ``out/gpu/NAME.json`` when it ends, and ``out/gpu/results.md`` has them all as tables. A second call
runs what is not done yet. Without a GPU, `--device cpu --size tiny` rehearses all parts; its figures say nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
from rich.console import Console
from rich.table import Table

from giornata_lab.rehearsals.gpu import campaign, needs
from giornata_lab.rehearsals.gpu.campaign import Folder, Record, Status
from giornata_lab.rehearsals.gpu.parts import FLUX, SIZES, TINY, parts

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


NO_GPU = 2
"""Exit status where there is no such device."""
TERMINAL = Console(width=160, highlight=False)


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--size", type=click.Choice(SIZES), default=FLUX, show_default=True, help="FLUX.1-dev's, or tiny"
)
@click.option("--only", multiple=True, metavar="PART", help="this part; may be given several times")
@click.option("--minutes", type=float, help="begin no part after so many minutes, and end the one that runs")
@click.option(
    "--wheels",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="install the wheels that `make gpu-wheels` has collected into this folder, beneath it, and import them first",
)
@click.option("--again", is_flag=True, help="run also what is done")
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/gpu"), show_default=True)
def main(
    device: str,
    size: str,
    only: tuple[str, ...],
    minutes: float | None,
    wheels: Path | None,
    *,
    again: bool,
    out: Path,
) -> None:
    """Begin the campaign; `wheels` are installed before: see :func:`giornata_lab.rehearsals.gpu.wheels.used`.

    Exit status: 0 where all parts are done, 1 where one is not, 2 where there is no such device."""
    if (reason := _unusable(device)) is not None:
        TERMINAL.print(reason, soft_wrap=True)
        sys.exit(NO_GPU)
    every = parts(size, device)
    if unknown := set(only) - {part.name for part in every}:
        names = ", ".join(part.name for part in every)
        raise click.UsageError(f"There is no part {', '.join(sorted(unknown))}; there are {names}.")
    for sentence in needs.told([part.name for part in every]):
        TERMINAL.print(sentence, soft_wrap=True)
    folder = Folder(out)
    chosen = [part for part in every if not only or part.name in only]
    began = time.monotonic()
    todo = campaign.due(chosen, folder.records(), again=again)
    for record in campaign.carried_out(todo, folder, None if minutes is None else 60 * minutes):
        # After every part: whatever ends this process, the page tells of all parts before.
        known = folder.records()
        _tell(record, peaks(known.values()))
        text = page(known[part.name] for part in every if part.name in known)
        (out / "results.md").write_text(text, encoding="utf-8")
    known = folder.records()
    _summary({part.name: known.get(part.name) for part in chosen}, time.monotonic() - began, out)
    done = all(part.name in known and known[part.name].status is Status.DONE for part in chosen)
    sys.exit(0 if done else 1)


def _unusable(device: str) -> str | None:
    """Return why nothing can run on `device`; None where it can."""
    if not needs.found("torch"):
        return "This Python has no torch. Name another: make gpu PYTHON=python3.12"
    import torch  # noqa: PLC0415 - a machine may lack it

    if device.startswith("cuda") and not torch.cuda.is_available():
        return (
            f"This machine has no CUDA device that torch {torch.__version__} can use, so nothing was measured. With an "
            "NVIDIA GPU, `make setup TORCH_INDEX=https://download.pytorch.org/whl/cu130` installs torch for it. "
            f"Without one, `python -m giornata_lab.rehearsals.gpu --device cpu --size {TINY}` rehearses the campaign."
        )
    return None


def _tell(record: Record, most: Mapping[str, float]) -> None:
    TERMINAL.rule(f"{record.part}: {record.status}, {record.seconds:.0f} s")
    TERMINAL.print(record.output, markup=False, soft_wrap=True)
    for row in over_possible(rows_of(record), most):
        shares = [f"{value:.2f} {name}" for name, value in row.items() if name.endswith("of the peak")]
        if shares:
            TERMINAL.print(
                f"achieved over possible, {' '.join(map(str, list(row.values())[:2]))}: {', '.join(shares)}",
                markup=False,
            )


def _summary(records: dict[str, Record | None], seconds: float, out: Path) -> None:
    table = Table(title=f"campaign, {seconds:.0f} s")
    for column in ("part", "status", "s", "shows"):
        table.add_column(column)
    for name, record in records.items():
        if record is None:
            table.add_row(name, "to be run", "", "")
        else:
            table.add_row(name, str(record.status), f"{record.seconds:.0f}", record.shows)
    TERMINAL.print(table, f"records and results.md are in {out}")
