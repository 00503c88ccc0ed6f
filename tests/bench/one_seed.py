"""How far the pictures of one seed are apart, whatever is reused: beside `reuse=off`, and beside another seed's.

``python -m tests.bench.one_seed --help``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from giornata_denoiser.engine.sources import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_prepost.images.pictures import Pixels
from giornata_tools.quality import metrics
from tests.bench.compute.bench_model import BenchModel, box_of, held_out
from tests.bench.compute.setting import BITS, DEFAULT, FORM, HALO
from tests.bench.reporting.report import write
from tests.bench.reuse_quality import KEPT_FOR, MODEL, STEPS
from tests.flags import option, parsed

OTHER: Final = 1000
"""What is added to the seeds of other pictures."""


def main() -> None:
    """Print the table and write ``out/bench/one_seed.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=8, help="held-out edits"),
            option("--side", type=int, default=256, help="of the pictures: 128 or 256"),
            option("--guidance", type=float, help="scale; default the checkpoint's own"),
            option("--steps", type=int, default=STEPS),
            option("--levels", type=int, default=DEFAULT.levels, help="recorded noise levels"),
        ],
    )
    torch.set_num_threads(1)
    model = BenchModel(options.model, steps=options.steps, guidance=options.guidance)
    requests = held_out(options.side, options.limit)
    how = ReuseOptions(correction_bits=DEFAULT.correction_bits)

    def painted(rows: Iterable[Row]) -> list[Pixels]:
        return [model.decode(row) for row in model.run(rows, how)]

    plain = [model.edit(request, HALO) for request in requests]
    where = [model.region(request, HALO) for request in requests]
    spec = RecordingSpec(frozenset({FORM}), BITS)
    templates = [model.template(request, spec, options.levels) for request in requests]
    off = painted(model.edit(request, None) for request in requests)
    others = [replace(request, seed=request.seed + OTHER) for request in requests]
    shown = {
        "auto, nothing taken": plain,
        "auto, a miss": [
            replace(row, region=place, renewed_every=KEPT_FOR, keeps_padding=True)
            for row, place in zip(plain, where, strict=True)
        ],
        "auto, a hit": [
            replace(row, region=place, template=template)
            for row, place, template in zip(plain, where, templates, strict=True)
        ],
        "off, another seed": [model.edit(request, None) for request in others],
    }
    table = []
    for name, rows in shown.items():
        found = [
            metrics.ssim(picture, other, box_of(request.mask))
            for picture, other, request in zip(painted(rows), off, requests, strict=True)
        ]
        table.append(
            {"beside off": name, "SSIM box": round(statistics.mean(found), 4), "least": round(min(found), 4)}
        )
    workload = {"model": str(options.model), "steps": options.steps, "edits": len(requests)}
    write("one_seed", table, workload=workload)


if __name__ == "__main__":
    main()
