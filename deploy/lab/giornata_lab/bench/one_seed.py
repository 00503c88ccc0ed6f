"""How far the pictures of one seed are apart, whatever is reused: beside `reuse=off`, and beside another seed's.

`SSIM box` is of the model's picture in the mask's box; `pasted` of the answer there, outside of the mask the original.

``python -m giornata_lab.bench.one_seed --help``.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from giornata.planning.step_costs import refresh_interval, refresh_offset
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.recorders import renew_steps
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.templates.identity import levels_of
from giornata_lab.bench.compute.bench_model import BenchModel, Request, box_of, held_out
from giornata_lab.bench.compute.setting import BITS, DEFAULT, FORM, HALO
from giornata_lab.bench.reporting.report import write
from giornata_lab.bench.reuse_quality import KEPT_FOR, MODEL, STEPS
from giornata_lab.flags import option, parsed
from giornata_prepost.images.masks import effective_alpha
from giornata_prepost.images.paste import paste
from giornata_prepost.images.pictures import Pixels
from giornata_tools.lora_profiler.profiler import ssim

OTHER: Final = 1000
"""What is added to the seeds of other pictures."""


def answered(request: Request, picture: Pixels) -> Pixels:
    """The answer to an edit whose model has painted `picture`."""
    return paste(request.image, effective_alpha(request.mask, 0, None), picture)


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
            option("--levels", type=int, help="recorded noise levels; default the family's own"),
        ],
    )
    torch.set_num_threads(1)
    model = BenchModel(options.model, steps=options.steps, guidance=options.guidance)
    requests = held_out(options.side, options.limit)
    how = ReuseOptions(correction_bits=DEFAULT.correction_bits)

    def painted(rows: Iterable[Row]) -> list[Pixels]:
        return [model.decode(row) for row in model.run(rows, how)]

    where = [model.region(request, HALO) for request in requests]
    spec = RecordingSpec(frozenset({FORM}), BITS)
    levels = options.levels or levels_of(DenoiserConfig(model="any"), model.family)
    templates = [model.template(request, spec, levels) for request in requests]
    others = [replace(request, seed=request.seed + OTHER) for request in requests]

    def missing(edits: Sequence[Request]) -> list[Row]:
        every = refresh_interval(options.steps, renew_steps(KEPT_FOR, model.family))
        later = refresh_offset(0, options.steps, every)
        return [
            replace(
                model.edit(edit, None),
                region=place if every else None,
                renewed_every=every,
                renewed_later=later,
            )
            for edit, place in zip(edits, where, strict=True)
        ]

    def hitting(edits: Sequence[Request]) -> list[Row]:
        return [
            replace(model.edit(edit, HALO), region=place, template=template)
            for edit, place, template in zip(edits, where, templates, strict=True)
        ]

    known = model.corrections(hitting(others), how)
    full = [model.edit(request, None) for request in requests]
    off = painted(full)
    shown = {
        "auto, a miss": missing(requests),
        "auto, a hit": hitting(requests),
        "auto, a hit with another seed's correction": [
            replace(row, corrections=each) for row, each in zip(hitting(requests), known, strict=True)
        ],
        "off, another seed": [model.edit(request, None) for request in others],
    }
    table = []
    for name, rows in shown.items():
        pairs = list(zip(requests, painted(rows), off, strict=True))
        own = [ssim(picture, other, box_of(request.mask)) for request, picture, other in pairs]
        pasted = [
            ssim(answered(request, picture), answered(request, other), box_of(request.mask))
            for request, picture, other in pairs
        ]
        table.append(
            {
                "beside off": name,
                "SSIM box": round(statistics.mean(own), 4),
                "least": round(min(own), 4),
                "pasted": round(statistics.mean(pasted), 4),
                "least pasted": round(min(pasted), 4),
            }
        )
    workload = {"model": str(options.model), "steps": options.steps, "edits": len(requests)}
    write("one_seed", table, workload=workload)


if __name__ == "__main__":
    main()
