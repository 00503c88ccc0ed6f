"""Python functions of ours that one step of the engine calls, and the files that they stand in.

``python -m giornata_lab.bench.step_calls`` counts with ``sys.setprofile``, on networks of a few tiny blocks. The rows
are in their middle steps: masked, of one mask or each of its own, they take from a template what is on the device
already; `full` computes everything. A generator that goes on counts as a call, and so does a comprehension before
Python 3.12; functions of torch and diffusers do not. ``--functions 20`` lists those that are called most often.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import click
import torch

from giornata_lab.bench.compute.calls import FAMILIES, FULL, counted_step, forms_of
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import Several, option, parsed

BATCHES: Final = ((1, 1), (4, 1), (4, 4))
"""Rows, and their different masks."""


def options_of(arguments: Sequence[str] | None = None) -> SimpleNamespace:
    """Flags."""
    return parsed(
        __doc__,
        [
            option("--family", type=Several(click.Choice(list(FAMILIES))), default=list(FAMILIES)),
            option("--functions", type=int, default=0, help="so many of each step, most often called first"),
            option("--seed", type=int, default=0, help="of the masks' places"),
        ],
        arguments,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Count, print, write ``out/bench/step_calls.json``."""
    options = options_of(arguments)
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for name in options.family:
        family = FAMILIES[name]()
        for form in (*forms_of(family), None):
            for rows, masks in BATCHES:
                calls = counted_step(family, form, rows, masks=masks, seed=options.seed)
                lines.append(
                    {
                        "family": name,
                        "form": form or FULL,
                        "rows": rows,
                        "masks": masks,
                        "calls": calls.total,
                        "files": len(calls.files),
                        "most": ", ".join(
                            f"{function} {times}"
                            for function, times in calls.functions.most_common(options.functions)
                        ),
                    }
                )
    write("step_calls", lines, workload={**vars(options), "counted": "one step of the engine, in its middle"})


if __name__ == "__main__":
    main()
