"""GenTD26, Alibaba's trace of image generation with LoRAs, as a trace of ours. Pure; texts in, requests out.

Of its two files one tells times, the other adapters. The lines of the timed one are the last lines of the other, in
order. Neither is shipped.
"""

from __future__ import annotations

import ast
import csv
import io
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Final

from giornata.wire.adapters import MAX_LORAS
from giornata.wire.requests import MAX_IMAGES, MAX_STEPS
from giornata_lab.loadgen.trace import LONGEST_S, TraceLine

TIMED: Final = "lora_request_trace.csv"
"""Columns gmt_create, num_inference_steps, num_images_per_prompt."""
ADAPTED: Final = "data_trace_processed.csv"
"""Column lora_args: a list of dictionaries with modelVersionId, as Python writes it."""
MOST_CHARACTERS: Final = 1 << 16
"""Longest cell that is read."""
STEPS: Final = 30
"""Steps of a request that tells none."""


def read(timed: str, adapted: str) -> list[TraceLine]:
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
