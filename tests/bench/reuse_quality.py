"""What reuse costs in picture: accelerated against full computation with the same noise, on held-out edits.

Every switch beside the default: form, bits, recorded levels, halo. ``python -m tests.bench.reuse_quality --help``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from deploy.quality import cases, metrics
from giornata_denoiser.reuse.template import Form, Template
from giornata_denoiser.row import Recording
from tests.bench.bench_model import BenchModel, Request, box_of
from tests.bench.report import write
from tests.bench.setting import Setting

MODEL: Final = Path("deploy/model/fresco")
STEPS: Final = 20
STRICT: Final = 0
"""Recorded noise levels: those of the edit's own steps."""


def variants() -> Iterator[Setting]:
    """The default, then each switch by itself, then the combinations that the Pareto front is drawn of."""
    yield Setting()
    for form in Form:
        for bits in (0, 8, 4):
            for levels in (4, 8, 16, STRICT):
                for halo in (0, 1, 2):
                    yield Setting(form, bits, levels, halo)


def compared(
    model: BenchModel, requests: Sequence[Request], chosen: Sequence[Setting]
) -> Iterator[dict[str, Any]]:
    """A row of the table for every variant."""
    full = {
        halo: model.run(model.edit(request, halo) for request in requests)
        for halo in {s.halo for s in chosen}
    }
    pictures = {halo: [model.decode(row) for row in rows] for halo, rows in full.items()}
    templates: dict[tuple[Form, int, int], list[Template]] = {}
    for switches in chosen:
        form, bits, levels, halo = astuple(switches)
        key = (form, bits, levels)
        if key not in templates:
            templates.clear()
            recording = Recording(frozenset({form}), bits)
            templates[key] = [model.template(r, recording, levels or model.steps) for r in requests]
        rows = []
        for request, template in zip(requests, templates[key], strict=True):
            row = model.edit(request, halo)
            tolerance = 1.0 if levels else 1e-4
            rows.append(replace(row, region=model.region(row, halo), template=template, tolerance=tolerance))
        boxes = [box_of(request.mask) for request in requests]
        fast = [model.decode(row) for row in model.run(rows)]
        scores = [metrics.ssim(a, b, box) for a, b, box in zip(fast, pictures[halo], boxes, strict=True)]
        peaks = [metrics.psnr_db(a, b, box) for a, b, box in zip(fast, pictures[halo], boxes, strict=True)]
        yield {
            "form": str(form),
            "bits": bits or 32,
            "levels": levels or "strict",
            "halo": halo,
            "SSIM": round(statistics.mean(scores), 4),
            "least": round(min(scores), 4),
            "PSNR dB": round(statistics.mean(peaks), 2),
            "KiB": round(statistics.mean(t.size_bytes for t in templates[key]) / 1024, 1),
            "computed": round(statistics.mean(row.computed_tokens / row.image_tokens for row in rows), 3),
        }


def main() -> None:
    """Print the table and write ``out/bench/reuse_quality.json``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--limit", type=int, default=48, help="held-out edits (default 48)")
    parser.add_argument("--side", type=int, default=256, help="of the pictures: 128 or 256 (default 256)")
    parser.add_argument("--variants", type=int, help="only so many of the variants")
    parser.add_argument("--guidance", type=float, default=30.0)
    options = parser.parse_args()
    torch.set_num_threads(2)
    slots = [slot for slot in cases.slots() if slot.side == options.side]
    requests = [
        Request(slot.name, case.scene.before, np.asarray(case.scene.mask), case.scene.caption, slot.index)
        for slot in cases.spread(slots, options.limit)
        for case in [cases.draw(slot)]
    ]
    model = BenchModel(options.model, steps=STEPS, guidance=options.guidance)
    chosen = list(dict.fromkeys(variants()))[: options.variants]
    rows = []
    for row in compared(model, requests, chosen):
        print(row, flush=True)
        rows.append(row)
    workload = {"edits": len(requests), "side": options.side, "steps": STEPS, "guidance": options.guidance}
    write("reuse_quality", rows, workload=workload)


if __name__ == "__main__":
    main()
