"""What a step asks of a GPU: operations that launch kernels, and bytes that they read and write, by rows.

``python -m giornata_lab.bench.launches`` needs no GPU: on the device `meta` nothing is computed, at FLUX.1-dev's
whole shape, or that of a transformer with ``--family``. A kernel's start takes 5 to 10 microseconds of the host, so
that a step of 1,000 operations cannot take less than 5 to 10 milliseconds. `÷ full` compares with a step in full of
as many rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from giornata.packed.packing import TraceLane
from giornata_lab.bench.compute.batches import MASK, Batches, StepKind
from giornata_lab.bench.compute.launches import Launches, counted
from giornata_lab.bench.compute.models import described
from giornata_lab.bench.options import family_option, rows_of, shared
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed

SHOWN: Final = 6
"""Names of operations in the table."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            *shared(tokens=4096, text=512, repeats=1, model="real", device="meta"),
            family_option(),
            option("--rows", type=Several(int), default=[1, 8], help="of a step"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write ``out/bench/launches.json``."""
    options = options_of(arguments)
    rows = rows_of(options)
    batches = Batches(rows)
    lines = []
    for count in options.rows:
        found = {kind: counted(batches.prepared(kind, count), rows.family.device.type) for kind in StepKind}
        lines += [_line(kind, count, found) for kind in StepKind]
    workload = {
        **vars(options),
        "model": described(rows.family),
        "mask": MASK,
        "setting": rows.setting.as_dict(),
    }
    write("launches", lines, workload=workload)


def _line(kind: StepKind, count: int, found: dict[StepKind, Launches]) -> dict[str, Any]:
    own, full = found[kind], found[StepKind.FULL]
    most = own.operations[TraceLane.COMPUTE].most_common(SHOWN)
    return {
        "rows": count,
        "step": str(kind),
        "operations": own.count(TraceLane.COMPUTE),
        "÷ full": round(own.count(TraceLane.COMPUTE) / full.count(TraceLane.COMPUTE), 3),
        "in loads": own.count(TraceLane.LOAD),
        "GB": round(own.moved_bytes[TraceLane.COMPUTE] / 1e9, 2),
        "GB in loads": round(own.moved_bytes[TraceLane.LOAD] / 1e9, 2),
        "most": ", ".join(f"{name} {times}" for name, times in most),
    }


if __name__ == "__main__":
    main()
