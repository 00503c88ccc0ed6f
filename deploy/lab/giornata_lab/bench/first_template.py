"""A miss as its picture's first template: the next edit, with other prompt and seed, beside full computation.

The next edit's mask is the first one's, or that one moved, or turned to the other side of the picture. Beside it: a
template run with correction, and the edit's own steps in full. `tokens of full` counts tokens and no time;
`recording_ms` is what it costs a step in full to be recorded. ``python -m giornata_lab.bench.first_template --help``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from giornata.packed.compute_set import BlockInputs, Region, unite_regions
from giornata.planning.step_costs import refresh_interval
from giornata_denoiser.blocks.recorders import EntryRecorder
from giornata_denoiser.config import DenoiserConfig
from giornata_denoiser.engine.batch_tensors import assemble, place_inputs
from giornata_denoiser.engine.denoise_step import denoise_step
from giornata_denoiser.engine.step_plan import ReuseOptions
from giornata_denoiser.rows.row import RecordingSpec, Row
from giornata_denoiser.rows.template import CachedTemplate
from giornata_lab.bench.compute.bench_model import BenchModel, Request, box_of, held_out
from giornata_lab.bench.compute.setting import DEFAULT
from giornata_lab.bench.reporting.report import write
from giornata_lab.flags import option, parsed
from giornata_lab.quality import metrics
from giornata_tools.lora_profiler.profiler import ssim

MODEL: Final = Path("deploy/model/fresco")
RENEWED: Final = DenoiserConfig.renew_steps
SPEC: Final = RecordingSpec(frozenset({DEFAULT.form}), DEFAULT.bits)
CORRECTED: Final = ReuseOptions(correction_bits=DEFAULT.correction_bits)
ROUNDS: Final = 9

EARLIER: Final[Mapping[str, Callable[[np.ndarray], np.ndarray]]] = {
    "the same": lambda mask: mask,
    "moved by 16 pixels": lambda mask: np.roll(mask, (16, 16), (0, 1)),
    "turned": lambda mask: mask[::-1, ::-1].copy(),
}
"""The mask of the edit that left the template, from that of the next one."""


@dataclass(frozen=True)
class Scored:
    """One edit beside full computation."""

    ssim: float
    psnr_db: float
    cost: float
    """Tokens that it computes, over those of full computation."""


class FirstTemplatePictures:
    """Edits of one model, and what they come to beside full computation."""

    def __init__(self, model: BenchModel, requests: Sequence[Request]) -> None:
        self._model, self._requests = model, requests
        self.scores: dict[tuple[str, str], list[Scored]] = {}

    def compare(self, index: int) -> None:
        """Score the edit of this index in every way."""
        model, request = self._model, self._requests[index]
        whole = model.edit(request, DEFAULT.halo)
        where = model.region(request, DEFAULT.halo)
        if where is None:
            return
        (full,) = model.run([whole])
        picture, box = model.decode(full), box_of(request.mask)
        for earlier, way, row in self._ways(index, whole, where):
            (done,) = model.run([row], CORRECTED)
            made = model.decode(done)
            inside = ssim(made, picture, box), metrics.psnr_db(made, picture, box)
            self.scores.setdefault((earlier, way), []).append(Scored(*inside, _cost(row)))

    def _ways(self, index: int, whole: Row, where: Region) -> Iterator[tuple[str, str, Row]]:
        request = self._requests[index]
        row = replace(whole, region=where)
        template = self._model.template(request, SPEC, DEFAULT.levels)
        yield "", "a template run, corrected", replace(row, template=template)
        yield "", "its own steps", replace(row, renewed_every=refresh_interval(row.steps, RENEWED))
        for name, masked in EARLIER.items():
            left = left_by(self._model, self._earlier(index, masked(request.mask)))
            if left is None or left.edited is None or (either := unite_regions(where, left.edited)) is None:
                continue
            taking = replace(whole, region=either, template=left)
            yield name, "what the earlier edit left, corrected", taking
            yield name, "… not corrected", replace(taking, corrections=())
            yield name, "… its repainted tokens, too", replace(taking, region=where)

    def _earlier(self, index: int, mask: np.ndarray) -> Request:
        """An edit of the same picture with another prompt and seed."""
        request, other = self._requests[index], self._requests[(index + 1) % len(self._requests)]
        return replace(request, mask=mask, prompt=other.prompt, seed=request.seed + 1000)


def left_by(model: BenchModel, request: Request) -> CachedTemplate | None:
    """Return what an edit without a template leaves; None where it computes all of the picture."""
    row = model.edit(request, DEFAULT.halo)
    where = model.region(request, DEFAULT.halo)
    if where is None:
        return None
    every = refresh_interval(row.steps, RENEWED)
    (done,) = model.run([replace(row, region=where, renewed_every=every, records=SPEC)])
    return CachedTemplate("left", row.grid, done.entries, edited=where)


def recording(model: BenchModel, request: Request) -> dict[str, float]:
    """Processor time of a step in full, and of recording it; bytes of one level."""
    row = model.edit(request, DEFAULT.halo)
    assembly = assemble(model.family, [row], [place_inputs(row, model.family)])

    def step(recorder: EntryRecorder | None) -> float:
        began = time.process_time()
        denoise_step(model.family, assembly, [row], (BlockInputs(recorder=recorder),))
        return (time.process_time() - began) * 1e3

    def recorder() -> EntryRecorder:
        return EntryRecorder(row.level, model.family.depth, SPEC)

    with torch.inference_mode():
        step(recorder())
        pairs = [(step(None), step(recorder())) for _ in range(ROUNDS)]
        kept = recorder()
        step(kept)
    return {
        "full_ms": round(statistics.median(plain for plain, _ in pairs), 1),
        "recording_ms": round(statistics.median(more - plain for plain, more in pairs), 1),
        "KiB a level": round(kept.entry().size_bytes / 1024, 1),
    }


def _cost(row: Row) -> float:
    text = row.prompts[0].joint_tokens
    full, masked = text + row.image_tokens, text + row.computed_tokens
    return (row.steps_in_full * full + (row.steps - row.steps_in_full) * masked) / (row.steps * full)


def _table(scores: Mapping[tuple[str, str], Sequence[Scored]]) -> list[dict[str, Any]]:
    return [
        {
            "earlier mask": earlier,
            "takes": way,
            "edits": len(found),
            "SSIM box": round(statistics.mean(one.ssim for one in found), 4),
            "least": round(min(one.ssim for one in found), 4),
            "PSNR box": round(statistics.mean(one.psnr_db for one in found), 2),
            "tokens of full": round(statistics.mean(one.cost for one in found), 3),
        }
        for (earlier, way), found in scores.items()
    ]


def main() -> None:
    """Print the table and write ``out/bench/first_template.json``."""
    options = parsed(
        __doc__,
        [
            option("--model", type=Path, default=MODEL),
            option("--limit", type=int, default=8, help="held-out edits"),
            option("--side", type=int, default=256, help="of the pictures: 128 or 256"),
            option("--guidance", type=float, default=30.0),
            option("--steps", type=int, default=20),
            option("--threads", type=int, default=1),
        ],
    )
    torch.set_num_threads(options.threads)
    requests = held_out(options.side, options.limit)
    how = {"steps": options.steps, "guidance": options.guidance}
    model = BenchModel(options.model, **how)
    pictures = FirstTemplatePictures(model, requests)
    for index in range(len(requests)):
        pictures.compare(index)
    rows = [*_table(pictures.scores), recording(model, requests[0])]
    for row in rows:
        print(row)
    path = write("first_template", rows, workload={"edits": len(requests), "side": options.side, **how})
    print(f"written to {path}")


if __name__ == "__main__":
    main()
