"""A step of one row and of several, masked beside in full: its time, and the memory that a row takes.

``python -m giornata_lab.bench.step_rows`` prints the ratio full ÷ masked by rows, each with a mask of the production
trace's mean ratio at a place of its own. What masked rows take is on the device before: `slabs` are what they keep
there from step to step, `peak` is the most that a step holds beyond. `a row` is what one more row adds to both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from giornata_denoiser.profiling.measuring import _peak_bytes
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.compute.rows import MASK, Batches
from giornata_lab.bench.harness import clock_of, compared, in_turns, median_ms, write
from giornata_lab.bench.options import family_option, rows_of, shared
from giornata_lab.flags import Several, option, parsed


class MeasuredRows(NamedTuple):
    """Steps of one kind and one number of rows."""

    times_ms: list[float]
    peak_bytes: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write ``out/bench/step_rows.json``."""
    options = parsed(
        __doc__,
        [
            *shared(tokens=256, text=32, repeats=3),
            family_option(),
            option("--rows", type=Several(int), default=[1, 2, 4, 8], help="of a step"),
        ],
        arguments,
    )
    rows = rows_of(options)
    batches = Batches(rows)
    lines: list[dict[str, Any]] = []
    for count in options.rows:
        # One after the other: what a batch keeps leaves no room for another one's.
        full, masked = (
            _measured(batches.prepared(count, masked=masks), rows.family.device, options)
            for masks in (False, True)
        )
        line = _line(count, full, masked, batches.kept_bytes(count))
        for masks, name in ((False, "full"), (True, "masked")):
            operations = batches.tera_operations(count, masked=masks)
            line[f"{name} TFLOP/s"] = round(operations / line[f"{name} ms"] * 1e3, 3)
        lines.append(line)
    _with_differences(lines)
    workload = {
        **vars(options),
        "model": described(rows.family),
        "mask": MASK,
        "setting": rows.setting.as_dict(),
    }
    write("step_rows", lines, workload=workload)


def _measured(step: Callable[[], object], device: Any, options: SimpleNamespace) -> MeasuredRows:
    """Repeats after one that warms up, and one more whose memory is measured."""
    times = in_turns({"": step}, options.repeats, clock=clock_of(options), device=device)
    return MeasuredRows(times[""], _peak_bytes(device, step))


def _line(count: int, full: MeasuredRows, masked: MeasuredRows, kept_bytes: int) -> dict[str, Any]:
    return {
        "rows": count,
        **compared("full ÷ masked", full.times_ms, masked.times_ms),
        "full ms": median_ms(full.times_ms),
        "masked ms": median_ms(masked.times_ms),
        "full peak MiB": _mib(full.peak_bytes),
        "masked peak MiB": _mib(masked.peak_bytes),
        "slabs MiB": _mib(kept_bytes),
    }


def _with_differences(lines: list[dict[str, Any]]) -> None:
    """Adds what one more row takes, from the line before to each; of the first one its own mean."""
    before = {"rows": 0, "masked peak MiB": 0.0, "slabs MiB": 0.0}
    for line in lines:
        held, was = (each["masked peak MiB"] + each["slabs MiB"] for each in (line, before))
        line["a row MiB"] = round((held - was) / (line["rows"] - before["rows"]), 1)
        before = line


def _mib(size_bytes: int) -> float:
    return round(size_bytes / 2**20, 1)


if __name__ == "__main__":
    main()
