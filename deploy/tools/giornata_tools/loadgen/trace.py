"""Requests in a file, to replay: CSV with a header line, or a JSON object a line. Pure; texts in, texts out.

Columns: ``timestamp`` (seconds from the start of the run) is needed; ``mask_ratio``, ``steps``, ``template``, ``n``,
``seed`` and ``shape`` may be left out or empty, and are then drawn.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_tools.loadgen.workload import MAX_SEED, MaskShape, Request, Workload, draw

LONGEST_S: Final = 30 * 86400.0
SUFFIXES: Final = (".csv", ".jsonl")


class TraceLine(BaseModel):
    """A request, as far as a file tells it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    timestamp: float = Field(ge=0, le=LONGEST_S)
    mask_ratio: float | None = Field(None, ge=0, le=1)
    steps: int | None = Field(None, ge=1, le=MAX_STEPS)
    template: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1, le=MAX_IMAGES)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    shape: MaskShape | None = None


def read(text: str, suffix: str) -> list[TraceLine]:
    """The requests in a file's `text`, in the order of their times; `suffix` is the file's, one of `SUFFIXES`.

    Raises:
        ValueError: says in which line what is wrong.
    """
    rows = _csv_rows(text) if suffix == ".csv" else _json_rows(text)
    lines = [_line(number, row) for number, row in rows]
    if not lines:
        raise ValueError("a trace holds one request or more")
    return sorted(lines, key=lambda line: line.timestamp)


def complete(lines: Sequence[TraceLine], workload: Workload, seed: int) -> list[Request]:
    """The requests of a trace; what it does not tell is drawn from `workload`."""
    drawn = draw([line.timestamp for line in lines], workload, seed)
    return [
        replace(request, **line.model_dump(exclude={"timestamp"}, exclude_none=True))
        for request, line in zip(drawn, lines, strict=True)
    ]


def write(requests: Sequence[Request], suffix: str) -> str:
    """A file's text, from which :func:`read` makes the same `requests`, which are in the order of their times."""
    rows = [
        {name: getattr(request, "at_s" if name == "timestamp" else name) for name in TraceLine.model_fields}
        for request in requests
    ]
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(TraceLine.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _csv_rows(text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="(more cells than the header)")
    for row in reader:
        yield reader.line_num, {name: value for name, value in row.items() if value}


def _json_rows(text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: no JSON: {error}") from error


def _line(number: int, row: Any) -> TraceLine:
    try:
        return TraceLine.model_validate(row)
    except ValidationError as error:
        told = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in told["loc"]) or "the line"
        accepted = ", ".join(TraceLine.model_fields)
        raise ValueError(f"line {number}: {where}: {told['msg']}; accepted are {accepted}") from error
