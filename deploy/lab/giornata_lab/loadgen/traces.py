"""Requests in a file, to replay: ours, and GenTD26, Alibaba's trace of image generation with LoRAs."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from giornata.wire.adapters import MAX_LORAS
from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_lab.loadgen.workload import (
    MAX_SEED,
    MaskShape,
    Workload,
    WorkloadRequest,
    arrival_times,
    draw,
    faster,
)

# Requests in a file, to replay: CSV with a header line, or a JSON object a line.
#
# Columns: ``timestamp`` (seconds from the start of the run) is needed; ``mask_ratio``, ``steps``,
# ``template``, ``n``, ``seed``, ``shape`` and ``adapters`` may be left out or empty, and are then drawn.
# ``adapters`` are names of LoRAs with spaces or semicolons between them, in JSON a list of them too; ``-``
# is none.


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


def read_trace_file(path: Path) -> list[TraceLine]:
    """The requests in a file, or in a folder with the files of GenTD26.

    Raises:
        ValueError: its name ends otherwise than a trace's, or it holds something else.
        OSError: it cannot be read.
    """
    if path.is_dir():
        timed, adapted = ((path / name).read_text(encoding="utf-8") for name in (TIMED, ADAPTED))
        return read_gentd26(timed, adapted)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} does not end with {' or '.join(SUFFIXES)}")
    return read_trace(path.read_text(encoding="utf-8"), suffix)


def read_trace(text: str, suffix: str) -> list[TraceLine]:
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


# GenTD26, Alibaba's trace of image generation with LoRAs, as a trace of ours. Pure; texts in, requests out.
#
# Of its two files one tells times, the other adapters. The lines of the timed one are the last lines of the
# other, in order. Neither is shipped.


TIMED: Final = "lora_request_trace.csv"
"""Columns gmt_create, num_inference_steps, num_images_per_prompt."""
ADAPTED: Final = "data_trace_processed.csv"
"""Column lora_args: a list of dictionaries with modelVersionId, as Python writes it."""
MOST_CHARACTERS: Final = 1 << 16
"""Longest cell that is read."""
STEPS: Final = 30
"""Steps of a request that tells none."""


def read_gentd26(timed: str, adapted: str) -> list[TraceLine]:
    """The timed requests, counted from the first one, in the order of their times.

    `timed` is the text of :data:`TIMED`, `adapted` that of :data:`ADAPTED`.

    Raises:
        ValueError: says in which file and line what is wrong.
    """
    times = list(_rows(timed, TIMED, "gmt_create", "num_inference_steps", "num_images_per_prompt"))
    adapters = list(_rows(adapted, ADAPTED, "lora_args"))
    if not times or len(adapters) < len(times):
        raise ValueError(
            f"received {len(times)} lines of {TIMED} and {len(adapters)} of {ADAPTED}; accepted are one or more, "
            "and at least as many"
        )
    found = []
    for (line, time), (other, row) in zip(times, adapters[-len(times) :], strict=True):
        at_s, steps, images = _numbers(time, f"line {line} of {TIMED}")
        found.append((at_s, steps, images, _adapters(row["lora_args"], f"line {other} of {ADAPTED}")))
    first_s = min(at_s for at_s, *_ in found)
    if max(at_s for at_s, *_ in found) - first_s > LONGEST_S:
        raise ValueError(f"the times of {TIMED} are more than {LONGEST_S / 86400:g} days apart")
    lines = [
        TraceLine(timestamp=at_s - first_s, steps=steps, n=images, adapters=adapters)
        for at_s, steps, images, adapters in found
    ]
    return sorted(lines, key=lambda line: line.timestamp)


def _rows(text: str, file: str, *columns: str) -> Iterator[tuple[int, Mapping[str, str]]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if lacking := [name for name in columns if name not in (reader.fieldnames or ())]:
        raise ValueError(f"{file} has no column {lacking[0]}; it has {', '.join(reader.fieldnames or ())}")
    for row in reader:
        yield reader.line_num, {name: row[name] or "" for name in columns}


def _numbers(row: Mapping[str, str], where: str) -> tuple[float, int, int]:
    """Time in seconds, steps and pictures."""
    try:
        at_s = datetime.fromisoformat(row["gmt_create"]).timestamp()
        steps = round(float(row["num_inference_steps"] or STEPS))
        images = round(float(row["num_images_per_prompt"] or 1))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{where}: {error}; received {dict(row)}") from error
    return at_s, min(MAX_STEPS, max(1, steps)), min(MAX_IMAGES, max(1, images))


def _adapters(text: str, where: str) -> tuple[str, ...]:
    """Ids of model versions, each once, as many as a request may have."""
    if not text:
        return ()
    if len(text) > MOST_CHARACTERS:
        raise ValueError(
            f"{where}: received lora_args of {len(text)} characters; accepted are {MOST_CHARACTERS}"
        )
    try:
        told = ast.literal_eval(text)  # literals alone: nothing is run
        ids = dict.fromkeys(str(one["modelVersionId"]) for one in told)
    except (ValueError, SyntaxError, TypeError, KeyError, MemoryError, RecursionError) as error:
        raise ValueError(
            f"{where}: received lora_args {text[:80]!r}; accepted is a list of dictionaries with modelVersionId"
        ) from error
    return tuple(ids)[:MAX_LORAS]


def busiest_windows(lines: Sequence[TraceLine], seconds: float, count: int) -> list[tuple[float, ...]]:
    """When requests come in the `count` stretches of `seconds` that have most, as shares of the stretch, in order.

    Stretches begin at multiples of `seconds`, so that no two overlap.

    Raises:
        ValueError: the trace has requests in fewer stretches.
    """
    found: dict[int, list[float]] = {}
    for line in lines:
        number, left_s = divmod(line.timestamp, seconds)
        found.setdefault(int(number), []).append(left_s / seconds)
    if len(found) < count:
        raise ValueError(f"received {count} windows of {seconds:g} s; the trace has requests in {len(found)}")
    busiest = sorted(found, key=lambda number: -len(found[number]))[:count]
    return [tuple(sorted(found[number])) for number in sorted(busiest)]


SHORTEST_S: Final = 1.0
"""A trace counts for at least this long."""


@dataclass(frozen=True)
class OfferedLoad:
    """One run's requests.

    Raises:
        ValueError: nothing would be measured.
    """

    rate: float | None
    """Requests a second; None: a trace says when they are due."""
    requests: tuple[WorkloadRequest, ...]
    warmup_s: float
    """Requests due before it are left out of all figures."""
    seconds: float
    """Length of the run after the warm-up."""

    def __post_init__(self) -> None:
        if not any(request.at_s >= self.warmup_s for request in self.requests):
            what = "the trace" if self.rate is None else f"{self.rate:g} requests a second"
            raise ValueError(
                f"no request of {what} is due within {self.seconds:g} s after the warm-up of {self.warmup_s:g} s"
            )


def drawn(
    rates: Sequence[float],
    workload: Workload,
    *,
    cv: float,
    seconds: float,
    warmup_s: float,
    seed: int,
) -> list[OfferedLoad]:
    """A load for each of `rates` (a second), whose times between requests vary by `cv`; equal seeds make equal loads.

    Raises:
        ValueError: nothing would be measured at a rate.
    """
    loads = []
    for rate in rates:
        requests = draw(arrival_times(rate, warmup_s + seconds, seed, cv), workload, seed)
        loads.append(OfferedLoad(rate, tuple(requests), warmup_s, seconds))
    return loads


def replayed(
    lines: Sequence[TraceLine], workload: Workload, *, speed: float, warmup_s: float, seed: int
) -> OfferedLoad:
    """The load of a trace, `speed` times as fast as it tells.

    Raises:
        ValueError: all of its requests belong to the warm-up.
    """
    requests = faster(complete(lines, workload, seed), speed)
    seconds = max(SHORTEST_S, requests[-1].at_s - warmup_s)
    return OfferedLoad(None, tuple(requests), warmup_s, seconds)
