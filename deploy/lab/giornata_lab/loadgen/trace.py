"""Requests in a file, to replay: CSV with a header line, or a JSON object a line. Pure; texts in, texts out.

Columns: ``timestamp`` (seconds from the start of the run) is needed; ``mask_ratio``, ``steps``, ``template``, ``n``,
``seed``, ``shape`` and ``adapters`` may be left out or empty, and are then drawn. ``adapters`` are names of LoRAs with
spaces or semicolons between them, in JSON a list of them too; ``-`` is none.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from giornata.wire.adapters import MAX_LORAS
from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_lab.loadgen.workload import MAX_SEED, MaskShape, Workload, WorkloadRequest, draw

LONGEST_S: Final = 30 * 86400.0
SUFFIXES: Final = (".csv", ".jsonl")
NONE: Final = "-"
"""In the column `adapters`: the request has none."""
NAME: Final = re.compile(r"[A-Za-z0-9_][\w.:-]{0,127}", re.ASCII)
"""An adapter's."""


def _names(told: Any) -> tuple[str, ...]:
    """Names in a cell, or a list of them."""
    words = re.split(r"[\s;]+", told.strip(" ;")) if isinstance(told, str) else told
    if words == [NONE]:
        return ()
    named = isinstance(words, list | tuple) and all(isinstance(w, str) and NAME.fullmatch(w) for w in words)
    if not named or len(set(words)) < len(words) or len(words) > MAX_LORAS:
        raise ValueError(
            f"received {str(told)[:80]!r}; accepted are up to {MAX_LORAS} names of letters, digits, dots, colons, "
            f"dashes and underscores, each once, with spaces or semicolons between them, or {NONE} for none"
        )
    return tuple(words)


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
    adapters: Annotated[tuple[str, ...], BeforeValidator(_names)] | None = None


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


def complete(lines: Sequence[TraceLine], workload: Workload, seed: int) -> list[WorkloadRequest]:
    """The requests of a trace; what it does not tell is drawn from `workload`."""
    drawn = draw([line.timestamp for line in lines], workload, seed)
    return [replace(request, **_told(line)) for request, line in zip(drawn, lines, strict=True)]


def write(requests: Sequence[WorkloadRequest], suffix: str) -> str:
    """A file's text, from which :func:`read` makes the same `requests`, which are in the order of their times."""
    rows = [
        {name: getattr(request, "at_s" if name == "timestamp" else name) for name in TraceLine.model_fields}
        | {"adapters": " ".join(request.adapters) or NONE}
        for request in requests
    ]
    if suffix == ".jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows)
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(TraceLine.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _told(line: TraceLine) -> dict[str, Any]:
    names = TraceLine.model_fields.keys() - {"timestamp"}
    return {name: value for name in names if (value := getattr(line, name)) is not None}


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
